"""Trains configs/speedrun_cifar10.toml's recipe with PyTorch on a CPU.

    pip install torch numpy
    python benches/peers/speedrun.py --data-dir DATA [--precision bf16] [--epochs 30] [--max-steps 10]

The network is that of models/tests/reference/networks.py: the same parameters, initial distributions and whitening. Augmentation,
label smoothing, optimizer, learning rate and weight average are the file's. Images are channels_last; bf16 is autocast.
With --max-steps it stops there and prints the median time of a step, else the test accuracy of the averaged weights, plain and
with mirror images.
"""

import argparse
import pathlib
import statistics
import sys
import time

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "models" / "tests" / "reference"))
from networks import NETWORKS  # noqa: E402

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
BATCH, SHIFT, CUTOUT, SMOOTHING, EMA = 1024, 2, 8, 0.2, 0.97
LR, MOMENTUM, DECAY, BIAS_FACTOR = 1.5, 0.85, 1.33e-3, 64
RISE, DIV, FINAL_DIV = 0.23, 5, 2.857


def cifar10(folder, files):
    records = [np.fromfile(folder / "cifar-10-batches-bin" / file, np.uint8).reshape(-1, 3073) for file in files]
    records = np.concatenate(records)
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 255)
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


def whitening(images, epsilon=5e-4):
    """Filters that whiten 2x2 patches: the eigenvectors of their second moments, scaled, and the same negated."""
    patches = F.unfold(images.double(), 2).transpose(1, 2).reshape(-1, 12)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + epsilon).sqrt()).T.flip(0).reshape(12, 3, 2, 2)
    return torch.cat([filters, -filters]).float()


def augmented(images, flipped):
    """Shifts each image by up to SHIFT pixels, with a mirrored border, mirrors those of `flipped`, and cuts out a square."""
    padded = F.pad(images, (SHIFT,) * 4, mode="reflect")
    rows, columns = torch.randint(0, 2 * SHIFT + 1, (2, len(images), 1, 1, 1))
    rows, columns = rows + torch.arange(32).view(1, 1, 32, 1), columns + torch.arange(32).view(1, 1, 1, 32)
    columns = torch.where(flipped.view(-1, 1, 1, 1), columns.flip(3), columns)
    images = padded[torch.arange(len(images)).view(-1, 1, 1, 1), torch.arange(3).view(1, 3, 1, 1), rows, columns]
    # The centre may be any pixel, so a square may reach over the border (DeVries & Taylor, 2017).
    top, left = torch.randint(0, 32, (2, len(images), 1, 1)) - CUTOUT // 2
    side = torch.arange(32)
    in_rows = (side.view(1, 32, 1) >= top) & (side.view(1, 32, 1) < top + CUTOUT)
    in_columns = (side.view(1, 1, 32) >= left) & (side.view(1, 1, 32) < left + CUTOUT)
    return images.masked_fill((in_rows & in_columns).unsqueeze(1), 0)


def optimizer_of(network):
    norms = [p for name, p in network.named_parameters() if "norm" in name and p.requires_grad]
    others = [p for name, p in network.named_parameters() if "norm" not in name and p.requires_grad]
    groups = [
        {"params": others, "lr": LR, "weight_decay": DECAY},
        {"params": norms, "lr": LR * BIAS_FACTOR, "weight_decay": DECAY / BIAS_FACTOR},
    ]
    return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, nesterov=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, type=pathlib.Path)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    images, labels = cifar10(args.data_dir, [f"data_batch_{i}.bin" for i in range(1, 6)])
    network = NETWORKS["airbench94"]()
    network.whiten.weight.data = whitening(images[:5000])
    network = network.to(memory_format=torch.channels_last).train()
    average = torch.optim.swa_utils.AveragedModel(
        network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(EMA), use_buffers=True
    )
    optimizer = optimizer_of(network)
    steps_per_epoch = len(images) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [group["lr"] for group in optimizer.param_groups],
        total_steps=args.epochs * steps_per_epoch,
        pct_start=RISE,
        div_factor=DIV,
        final_div_factor=FINAL_DIV,
        anneal_strategy="linear",
        cycle_momentum=False,
    )
    first_flipped = torch.rand(len(images)) < 0.5
    limit = args.max_steps or args.epochs * steps_per_epoch
    times, start = [], time.perf_counter()
    for epoch in range(args.epochs):
        order = torch.randperm(len(images))
        for step in range(steps_per_epoch):
            if len(times) == limit:
                break
            begin = time.perf_counter()
            batch = order[step * BATCH : (step + 1) * BATCH]
            x = augmented(images[batch], first_flipped[batch] ^ (epoch % 2 == 1))
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                logits = network(x.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), labels[batch], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(network)
            times.append(time.perf_counter() - begin)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {time.perf_counter() - start:.0f} s", flush=True)
        if len(times) == limit:
            break
    print(f"median step {1000 * statistics.median(times[1:] or times):.0f} ms, batch {BATCH}, {args.precision}")
    if args.max_steps:
        return

    average.eval()
    test, test_labels = cifar10(args.data_dir, ["test_batch.bin"])
    right, right_tta = 0, 0
    with torch.no_grad():
        for first in range(0, len(test), BATCH):
            x, y = test[first : first + BATCH], test_labels[first : first + BATCH]
            plain, mirrored = average(x), average(x.flip(3))
            right += (plain.argmax(1) == y).sum().item()
            right_tta += ((plain + mirrored).argmax(1) == y).sum().item()
    percent = lambda count: f"{100 * count / len(test):.2f} %"
    print(f"test accuracy {percent(right)}, with mirror images {percent(right_tta)}")


if __name__ == "__main__":
    main()
