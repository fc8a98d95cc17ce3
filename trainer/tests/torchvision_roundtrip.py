"""torchvision's networks and trainer's of the same names exchange weights, both ways, with equal losses.

    pip install torch torchvision safetensors
    python trainer/tests/torchvision_roundtrip.py [--models resnet18_imagenet,mobilenet_v2_imagenet,…] [--side 64]

To trainer: torchvision's network with random weights and statistics is saved with torch.save; `trainer eval` evaluates the file on
a folder of pictures, and torchvision the same pictures.
Back: trainer fine-tunes from that file, for another number of classes and with frozen layers, and exports the result; torchvision
loads the export with strict=True and evaluates it. The frozen tensors must be those of the first file.

Prints a table; exit code 0 or 1.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
NETWORKS = {
    "resnet18_imagenet": torchvision.models.resnet18,
    "resnet34_imagenet": torchvision.models.resnet34,
    "resnet50_imagenet": torchvision.models.resnet50,
    "resnet101_imagenet": torchvision.models.resnet101,
    "resnet152_imagenet": torchvision.models.resnet152,
    "mobilenet_v2_imagenet": torchvision.models.mobilenet_v2,
    "efficientnet_b0_imagenet": torchvision.models.efficientnet_b0,
}
CLASSES, PICTURES = ["cat", "dog", "emu"], 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOSS_TOLERANCE = 1e-4


def pictures(folder, side):
    """Writes pictures in classes of different brightness; returns the test split, normalised, and its labels."""
    random, images, labels = np.random.default_rng(1), [], []
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for index in range(PICTURES):
                image = random.integers(60 * label, 60 * label + 120, (side, side, 3), dtype=np.uint8)
                Image.fromarray(image).save(folder / split / name / f"{index}.png")
                if split == "test":
                    images.append(image)
                    labels.append(label)
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), torch.tensor(labels)


def random_network(constructor, classes):
    """A network of which no tensor has its initial value."""
    network = constructor(num_classes=classes)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if name.endswith("running_mean"):
                tensor.normal_(0, 0.2)
            elif name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() == 1 and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return network


@torch.no_grad()
def loss_of(network, x, labels):
    return F.cross_entropy(network.eval()(x), labels).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NETWORKS))
    parser.add_argument("--side", type=int, default=64, help="pixels; 32 or more")
    parser.add_argument("--trainer", default=str(REPOSITORY / "target/release/trainer"))
    options = parser.parse_args()
    torch.manual_seed(0)
    failed = False
    print(f"torchvision {torchvision.__version__}, {len(CLASSES) * PICTURES} pictures of {options.side}x{options.side}")
    print(f"{'model':<26} {'weights':<12} {'trainer loss':>12} {'torchvision':>12} {'tensors':>8}  frozen")

    def run(*arguments):
        command = [options.trainer, *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"{' '.join(command)} ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
        return ended.stdout

    for name in options.models.split(","):
        constructor = NETWORKS[name]
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            x, labels = pictures(folder / "pictures", options.side)
            mean, std = (",".join(map(str, values)) for values in (MEAN, STD))
            data = ["--data", "image-folder", "--data-dir", folder / "pictures", "--mean", mean, "--std", std, "--json"]

            def row(what, file, network, frozen):
                nonlocal failed
                ours = json.loads(run("eval", "--model", name, "--weights", file, *data))["loss"]
                theirs = loss_of(network, x, labels)
                good = abs(ours - theirs) <= LOSS_TOLERANCE * max(1, abs(theirs)) and frozen is not False
                failed |= not good
                count = sum(not key.endswith("num_batches_tracked") for key in network.state_dict())
                mark = "" if good else "  WRONG"
                print(f"{name:<26} {what:<12} {ours:>12.6f} {theirs:>12.6f} {count:>8}  {frozen or ''}{mark}", flush=True)

            # To trainer: as many classes as the pictures have.
            network = random_network(constructor, len(CLASSES))
            file = folder / "torchvision.pth"
            torch.save(network.state_dict(), file)
            row("torchvision", file, network, None)

            # Back: from weights for another number of classes.
            network = random_network(constructor, 10)
            torch.save({"model": network.state_dict(), "epoch": 90}, file)
            frozen = ["conv1", "bn1", "layer1"] if "resnet" in name else ["features.0", "features.1", "features.2"]
            config = folder / "config.toml"
            config.write_text(
                f'[model]\nname = "{name}"\nweights = "{file}"\nfreeze = {json.dumps(frozen)}\n'
                f'[data]\nname = "image-folder"\ndir = "{folder / "pictures"}"\nmean = {list(MEAN)}\nstd = {list(STD)}\n'
                "[train]\nepochs = 1\nbatch_size = 12\n[optimizer]\nlr = 0.01\n"
            )
            run("--config", config, "--run-dir", folder / "runs", "--quiet")
            [trained] = (folder / "runs").iterdir()
            run("export", "--run", trained, "--checkpoint", "last", "--to", folder / "tuned.safetensors")
            tuned = constructor(num_classes=len(CLASSES))
            tuned.load_state_dict(load_file(folder / "tuned.safetensors"), strict=True)
            before, after = network.state_dict(), tuned.state_dict()
            within = lambda key: any(key.startswith(module + ".") for module in frozen)
            counted = {key for key in before if not key.endswith("num_batches_tracked")}
            same = {key for key in counted if before[key].shape == after[key].shape and torch.equal(before[key], after[key])}
            kept = same == {key for key in counted if within(key)}
            row("trainer", folder / "tuned.safetensors", tuned, f"{len(same)} tensors equal" if kept else False)
    print("a difference" if failed else "both directions agree")
    sys.exit(failed)


if __name__ == "__main__":
    main()
