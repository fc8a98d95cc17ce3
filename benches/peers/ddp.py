"""Compares one process with two threads and two processes with one thread, of `trainer` and of PyTorch's DDP over gloo, in turns.

usage: ddp.py TRAINER [--data-dir DIR] [--model NAME] [--batch N] [--steps N] [--rounds N] [--precision f32|bf16]

The batch is that of all processes together. `trainer` trains on CIFAR-10 of DIR (`trainer compare`); PyTorch gets one random batch,
so it has no loader. PyTorch uses channels_last, in bf16 with autocast. Prints medians over the rounds: images per second, and how
many times as fast as one process two are.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import torch
    from torch.nn import functional as F
except ImportError as error:
    sys.exit(f"no PyTorch: {error}")

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "models" / "tests" / "reference"))
from networks import NETWORKS, image_shape  # noqa: E402

WARM_UP = 2
CONFIG = """
[model]
name = "{model}"
[data]
name = "cifar10"
augment = ["reflect-crop:4", "flip"]
[train]
epochs = 1
batch_size = {batch}
precision = "{precision}"
[optimizer]
kind = "sgd"
lr = 0.01
momentum = 0.9
nesterov = true
"""


def train(options, threads):
    """Returns the images per second of this process's training, of all processes together."""
    torch.set_num_threads(threads)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    torch.manual_seed(0)
    model = NETWORKS[options.model]().to(memory_format=torch.channels_last)
    network = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    x = torch.randn(options.batch // ranks, *image_shape(options.model)).to(memory_format=torch.channels_last)
    y = torch.arange(len(x)) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4)
    times = []
    for _ in range(WARM_UP + options.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            loss = F.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return options.batch / statistics.median(times[WARM_UP:])


def worker(rank, options, store, rates):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rate = train(options, 1)
    if rank == 0:
        rates.put(rate)
    torch.distributed.destroy_process_group()


def pytorch(options, processes):
    context = torch.multiprocessing.get_context("spawn")
    rates = context.SimpleQueue()
    if processes == 1:
        one = context.Process(target=lone_worker, args=(options, rates))
        one.start()
        one.join()
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(worker, (options, f"{folder}/store", rates), nprocs=2)
    return rates.get()


def lone_worker(options, rates):
    rates.put(train(options, 2))


def ours(options, folder):
    config = pathlib.Path(folder, "config.toml")
    config.write_text(CONFIG.format(model=options.model, batch=options.batch, precision=options.precision))
    command = [options.trainer, "compare", "--config", config, "--cpus", "2", "--modes", "single,ddp", "--rounds", "1"]
    command += ["--steps", str(WARM_UP + options.steps), "--json", "--out", pathlib.Path(folder, "out")]
    command += ["--data-dir", options.data_dir] if options.data_dir else []
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {mode["mode"]: mode["images_per_s"] for mode in result["modes"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="bf16", choices=["f32", "bf16"])
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rates = ours(options, folder)
        rounds.append([rates["single"], rates["ddp"], pytorch(options, 1), pytorch(options, 2)])
    single, two, peer_single, peer_two = map(statistics.median, zip(*rounds))
    print(f"{options.model}, {options.precision}, batch {options.batch}, images/s, medians of {options.rounds} rounds")
    print(f"trainer  1 process {single:.0f}, 2 processes {two:.0f} ({two / single:.2f})")
    print(f"PyTorch  1 process {peer_single:.0f}, 2 processes {peer_two:.0f} ({peer_two / peer_single:.2f})")
    print(f"trainer / PyTorch: 1 process {single / peer_single:.2f}, 2 processes {two / peer_two:.2f}")


if __name__ == "__main__":
    main()
