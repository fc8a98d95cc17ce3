"""Times PyTorch's DataLoader: python benches/peers/loader.py [BATCHES | --files FOLDER]

With `--files` it times torchvision on the images of FOLDER/CLASS, as `cargo bench -p benches --bench loader -- jpeg PYTHON` does:
one worker, `RandomResizedCrop(224)`, flip, normalise. Each line on standard input starts an epoch, whose images per second it
prints. Otherwise:

Does the work of `cargo bench -p benches --bench loader` with a Dataset that augments sample by sample with tensor
operations on uint8 images in memory (torchvision is not needed): shuffled batches of 128, BATCHES batches per round (default
391, an epoch of CIFAR-10), configurations interleaved, medians over the rounds.
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

ROUNDS = 5
IMAGES, BATCH = 50_000, 128
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2023, 0.1994, 0.2010]).view(3, 1, 1)


class Noise(Dataset):
    """CIFAR-shaped noise, augmented according to the flags."""

    def __init__(self, crop_flip, cutout):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
        self.labels = (torch.arange(IMAGES) % 10).tolist()
        self.crop_flip, self.cutout = crop_flip, cutout

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        image = self.images[index]
        if self.crop_flip:
            top, left = torch.randint(0, 9, (2,)).tolist()
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
            if torch.rand(()).item() < 0.5:
                image = image.flip(2)
        image = (image.float().div_(255) - MEAN).div_(STD)
        if self.cutout:
            y, x = torch.randint(0, 32, (2,)).tolist()
            image[:, max(y - 4, 0) : y + 4, max(x - 4, 0) : x + 4] = 0
        return image, self.labels[index]


def images_per_second(loader, batches):
    start, images = time.perf_counter(), 0
    for index, (batch, _labels) in enumerate(loader, 1):
        images += len(batch)
        if index == batches:
            break
    return images / (time.perf_counter() - start)


def files(folder):
    """Times an epoch of the images in `folder` for each line of standard input."""
    from torchvision import datasets, transforms

    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    crop, flip = transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()
    dataset = datasets.ImageFolder(folder, transforms.Compose([crop, flip, transforms.ToTensor(), normalize]))
    options = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4, "drop_last": True}
    loader = DataLoader(dataset, 32, shuffle=True, **options)
    for _line in sys.stdin:
        print(images_per_second(loader, len(loader)), flush=True)


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--files"]:
        return files(sys.argv[2])
    batches = int(sys.argv[1]) if len(sys.argv) > 1 else -(-IMAGES // BATCH)
    rows = []
    for name, flags in [
        ("normalise", (False, False)),
        ("crop, flip, normalise", (True, False)),
        ("crop, flip, cutout, normalise", (True, True)),
    ]:
        for workers in (1, 2):
            options = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4}
            rows.append((name, workers, DataLoader(Noise(*flags), BATCH, shuffle=True, **options), []))
    # Round 0 starts the worker processes and is not counted.
    for counted in range(ROUNDS + 1):
        for _name, _workers, loader, rates in rows:
            rate = images_per_second(loader, batches)
            if counted:
                rates.append(rate)
    print(f"{'augmentation':<40} {'workers':>7} {'images/s':>12} {'slowest':>12} {'fastest':>12}")
    for name, workers, _loader, rates in rows:
        print(f"{name:<40} {workers:>7} {statistics.median(rates):>12.0f} {min(rates):>12.0f} {max(rates):>12.0f}")


if __name__ == "__main__":
    main()
