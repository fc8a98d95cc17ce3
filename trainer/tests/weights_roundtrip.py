"""Weights travel between trainer and PyTorch: each side trains a model, the other evaluates it on the whole test set.

    pip install torch numpy safetensors
    python trainer/tests/weights_roundtrip.py --data cifar10 --data-dir DIR [--models lenet,resnet18] [--steps 200]

Ours to PyTorch: trainer trains and exports, PyTorch loads the file with strict=True and evaluates it.
PyTorch to ours: PyTorch trains, saves the weights as pytorch-cifar does ({'net': ...} of a DataParallel model, so names
begin with `module.`), as a plain state dict in PyTorch's old format, and as safetensors; trainer evaluates each.

The number of correctly classified test images may differ by one. Prints a table; exit code 0 or 1.
"""

import argparse
import gzip
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SETS = {
    # channels, side, mean, standard deviation
    "cifar10": (3, 32, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "fashion-mini": (1, 28, (0.2860,), (0.3530,)),
}


class LeNet(nn.Module):
    """pytorch-cifar's models/lenet.py; fc1 has as many inputs as the image leaves."""

    def __init__(self, channels, side):
        super().__init__()
        left = ((side - 4) // 2 - 4) // 2
        self.conv1, self.conv2 = nn.Conv2d(channels, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * left * left, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class BasicBlock(nn.Module):
    """pytorch-cifar's models/resnet.py."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, channels, side):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        inputs = 64
        for i, width in enumerate([64, 128, 256, 512], 1):
            blocks = nn.Sequential(BasicBlock(inputs, width, 1 if i == 1 else 2), BasicBlock(width, width, 1))
            setattr(self, f"layer{i}", blocks)
            inputs = width
        self.linear = nn.Linear(512, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.linear(F.avg_pool2d(x, 4).flatten(1))


MODELS = {"lenet": LeNet, "resnet18": ResNet18}


def read(data, folder, split):
    """Images as bytes [N, C, H, W] and labels."""
    if data == "cifar10":
        folder = pathlib.Path(folder)
        if (folder / "cifar-10-batches-bin").is_dir():
            folder = folder / "cifar-10-batches-bin"
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
        records = np.concatenate([np.fromfile(folder / name, np.uint8).reshape(-1, 3073) for name in names])
        return torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy()), torch.from_numpy(records[:, 0].astype(np.int64))
    name = {"train": "train", "test": "t10k"}[split]
    folder = REPOSITORY / "data/assets/fashion-mini"
    images = np.frombuffer(gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    return torch.from_numpy(images.reshape(-1, 1, 28, 28).copy()), torch.from_numpy(labels.astype(np.int64))


class Peer:
    """PyTorch's side: the data set, a training loop and an evaluation."""

    def __init__(self, options):
        self.options = options
        self.channels, self.side, mean, std = SETS[options.data]
        self.mean, self.std = (torch.tensor(v).view(1, -1, 1, 1) for v in (mean, std))
        self.train_set, self.test_set = (read(options.data, options.data_dir, split) for split in ("train", "test"))

    def model(self, name):
        return MODELS[name](self.channels, self.side).to(memory_format=torch.channels_last)

    def normalised(self, images):
        return ((images.float() / 255 - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    def train(self, name):
        model, (images, labels) = self.model(name), self.train_set
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        order = iter([])
        for _ in range(self.options.steps):
            batch = next(order, None)
            if batch is None or len(batch) < self.options.batch:
                order = iter(torch.randperm(len(images)).split(self.options.batch))
                batch = next(order)
            optimizer.zero_grad()
            F.cross_entropy(model(self.normalised(images[batch])), labels[batch]).backward()
            optimizer.step()
        return model, optimizer

    @torch.no_grad()
    def correct(self, model):
        model.eval()
        images, labels = self.test_set
        parts = zip(images.split(500), labels.split(500))
        return sum(int((model(self.normalised(x)).argmax(1) == y).sum()) for x, y in parts)


class Ours:
    """trainer's side."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.data_dir = ["--data-dir", options.data_dir] if options.data_dir else []

    def run(self, *arguments):
        command = [self.options.trainer, *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"{' '.join(command)} ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
        return ended.stdout

    def train(self, name):
        """Trains and exports; gives the file and what trainer itself says of the run."""
        config, runs, file = self.folder / f"{name}.toml", self.folder / f"runs-{name}", self.folder / f"{name}.safetensors"
        config.write_text(
            f'[model]\nname = "{name}"\n[data]\nname = "{self.options.data}"\n'
            f"[train]\nepochs = 1000\nmax_steps = {self.options.steps}\nbatch_size = {self.options.batch}\n"
            'eval_every = 1000\n[optimizer]\nkind = "sgd"\nlr = 0.02\nmomentum = 0.9\nweight_decay = 5e-4\n'
            '[schedule]\nkind = "constant"\n'
        )
        self.run("--config", config, "--run-dir", runs, "--quiet", *self.data_dir)
        [run] = runs.iterdir()
        self.run("export", "--run", run, "--checkpoint", "last", "--to", file)
        said = json.loads((run / "summary.json").read_text())["last"]
        return file, said["correct"], said["total"]

    def correct(self, name, file):
        arguments = ["--model", name, "--weights", file, "--data", self.options.data, "--json"]
        said = json.loads(self.run("eval", *arguments, *self.data_dir))
        return said["correct"], said["total"]


def save(model, optimizer, folder):
    """The ways in which PyTorch's users save weights."""
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    files = [folder / name for name in ("net_module.pth", "old_format.pth", "plain.safetensors")]
    wrapped = {"net": nn.DataParallel(model).state_dict(), "acc": 0.0, "epoch": 1, "optimizer": optimizer.state_dict()}
    torch.save(wrapped, files[0])
    torch.save(state, files[1], _use_new_zipfile_serialization=False)
    save_file(state, files[2])
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=SETS, required=True)
    parser.add_argument("--data-dir", help="folder of the data set; fashion-mini needs none")
    parser.add_argument("--models", default="lenet,resnet18")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--trainer", default=str(REPOSITORY / "target/release/trainer"))
    options = parser.parse_args()
    torch.manual_seed(0)

    peer, failed = Peer(options), False
    print(f"{'model':<10} {'trained by':<10} {'file':<20} {'trainer':>8} {'PyTorch':>8} {'of':>7} {'difference':>10}")

    def row(name, by, file, ours, theirs, total):
        nonlocal failed
        failed |= abs(ours - theirs) > 1
        print(f"{name:<10} {by:<10} {file.name:<20} {ours:>8} {theirs:>8} {total:>7} {ours - theirs:>10}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(options, pathlib.Path(folder))
        for name in options.models.split(","):
            start = time.monotonic()
            file, correct, total = ours.train(name)
            model = peer.model(name)
            model.load_state_dict(load_file(file), strict=True)
            row(name, "trainer", file, correct, peer.correct(model), total)

            model, optimizer = peer.train(name)
            theirs = peer.correct(model)
            for file in save(model, optimizer, pathlib.Path(folder)):
                correct, total = ours.correct(name, file)
                row(name, "PyTorch", file, correct, theirs, total)
            print(f"{name}: {options.steps} steps of {options.batch} each, {time.monotonic() - start:.0f} s", flush=True)
    print("a difference above 1" if failed else "each side evaluates the other's models as the other does")
    sys.exit(failed)


if __name__ == "__main__":
    main()
