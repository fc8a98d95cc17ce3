"""Trains networks with trainer and with PyTorch from the same weights on the same batches, and compares the losses.

    pip install torch numpy safetensors matplotlib
    python benches/peers/curves.py --trainer target/release/trainer --data-dir DATA --out OUT [MODEL ...]

Each network is trained for 200 steps in f32 on CIFAR-10 without augmentation: SGD with Nesterov momentum and weight decay.
trainer exports its initial weights, and PyTorch loads them with strict=True. The order of the samples is that of PyTorch's
DistributedSampler with set_epoch(1). PyTorch runs twice, with images in both memory layouts: rounding differs between them,
and the difference of their losses is what to expect of two correct programs.
Writes OUT/curves.svg and OUT/losses.json, and prints a table: mean and largest |difference| of the loss over ranges of steps.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import matplotlib
import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "models" / "tests" / "reference"))
from networks import NETWORKS  # noqa: E402

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
LR, MOMENTUM, DECAY = 0.02, 0.9, 5e-4
CONFIG = """
[model]
name = "{model}"
[data]
name = "cifar10"
augment = []
mean = {mean}
std = {std}
[train]
max_steps = {steps}
epochs = 1
batch_size = {batch}
[optimizer]
kind = "sgd"
lr = {lr}
momentum = {momentum}
nesterov = true
weight_decay = {decay}
[schedule]
kind = "constant"
[log]
every = 1
"""
# Ends of the ranges of steps in the table.
RANGES = [1, 10, 50, 100, 200]


def ours(args, model, folder):
    """Returns trainer's initial weights and its losses."""

    def run(name, steps, lr):
        config = folder / f"{name}.toml"
        values = dict(model=model, mean=list(MEAN), std=list(STD), steps=steps, batch=args.batch)
        config.write_text(CONFIG.format(**values, lr=lr, momentum=MOMENTUM, decay=DECAY))
        runs = folder / name
        command = [args.trainer, "--config", config, "--data-dir", args.data_dir, "--run-dir", runs, "--quiet"]
        subprocess.run(command, check=True)
        return next(path for path in runs.iterdir() if path.is_dir())

    # One step of a learning rate that changes no weight leaves the initial weights.
    untrained = run("initial", 1, 1e-30)
    weights = folder / "initial.safetensors"
    subprocess.run([args.trainer, "export", "--run", untrained, "--to", weights], check=True, stdout=subprocess.DEVNULL)
    lines = (run("run", args.steps, LR) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return load_file(weights), [step["loss"] for step in steps if "step_ms" in step]


def cifar10(folder):
    files = [folder / "cifar-10-batches-bin" / f"data_batch_{i}.bin" for i in range(1, 6)]
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 255)
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


def pytorch(args, model, weights, images, labels, layout):
    network = NETWORKS[model]()
    network.load_state_dict(weights, strict=True)
    network = network.to(memory_format=layout).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY)
    sampler = DistributedSampler(range(len(labels)), num_replicas=1, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(1)
    order = torch.tensor(list(sampler))
    losses = []
    for step in range(args.steps):
        batch = order[step * args.batch : (step + 1) * args.batch]
        loss = F.cross_entropy(network(images[batch].to(memory_format=layout)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", required=True, type=pathlib.Path)
    parser.add_argument("--data-dir", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("models", nargs="*", default=["lenet", "mobilenetv2", "resnet18"])
    args = parser.parse_args()
    args.trainer, args.data_dir = args.trainer.resolve(), args.data_dir.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)

    images, labels = cifar10(args.data_dir)
    print("| network | steps | trainer - PyTorch: mean, max | PyTorch channels_last - NCHW: mean, max | loss there |")
    print("| --- | ---: | ---: | ---: | ---: |")
    found = {}
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            weights, mine = ours(args, model, pathlib.Path(folder))
        layouts = torch.contiguous_format, torch.channels_last
        nchw, last = (pytorch(args, model, weights, images, labels, layout) for layout in layouts)
        assert len(mine) == len(nchw), f"{len(mine)} losses of trainer, {len(nchw)} of PyTorch"
        found[model] = {"trainer": mine, "pytorch_nchw": nchw, "pytorch_channels_last": last}
        mine, nchw, last = (np.array(losses) for losses in (mine, nchw, last))
        first = 0
        for end in [*(end for end in RANGES if end < args.steps), args.steps]:
            at = slice(first, end)
            cell = lambda d: f"{np.abs(d).mean():.1e}, {np.abs(d).max():.1e}"
            steps = str(end) if end == first + 1 else f"{first + 1}-{end}"
            print(f"| {model} | {steps} | {cell(mine[at] - nchw[at])} | {cell(last[at] - nchw[at])} | {nchw[at].mean():.3f} |")
            first = end
        sys.stdout.flush()
    (args.out / "losses.json").write_text(json.dumps(found))

    figure, axes = pyplot.subplots(1, len(found), figsize=(4.2 * len(found), 3.2), squeeze=False)
    for axis, (model, losses) in zip(axes[0], found.items()):
        axis.plot(losses["pytorch_nchw"], color="#d95f02", linewidth=2.4, alpha=0.55, label="PyTorch, NCHW")
        axis.plot(losses["pytorch_channels_last"], color="#7570b3", linewidth=1.2, label="PyTorch, channels_last")
        axis.plot(losses["trainer"], color="black", linewidth=0.7, linestyle="--", label="trainer")
        axis.set(title=model, xlabel="step", ylabel="training loss")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.out / "curves.svg")


if __name__ == "__main__":
    main()
