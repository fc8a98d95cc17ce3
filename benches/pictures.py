"""Writes a data set as a folder of pictures: DIR/train/CLASS/NUMBER.png and DIR/test/….

    pip install numpy pillow
    python benches/pictures.py FOLDER DIR [--limit N]

FOLDER has the four IDX files of Fashion-MNIST, gzipped or not, or the six binary files of CIFAR-10. `--limit` writes the first N
pictures of each split.
"""

import argparse
import gzip
import pathlib

import numpy as np
from PIL import Image


def idx(folder, name, header):
    path = next(path for path in (folder / name, folder / f"{name}.gz") if path.exists())
    data = path.read_bytes()
    return np.frombuffer(gzip.decompress(data) if path.suffix == ".gz" else data, np.uint8, offset=header)


def read(folder, split):
    """Returns images [N, H, W] or [N, H, W, 3] and labels [N]."""
    cifar = sorted(folder.glob("data_batch_*.bin" if split == "train" else "test_batch.bin"))
    if cifar:
        # One byte for the label, then the red, green and blue pixels of 32x32.
        records = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, 3073) for path in cifar])
        return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]
    name = "train" if split == "train" else "t10k"
    images = idx(folder, f"{name}-images-idx3-ubyte", 16).reshape(-1, 28, 28)
    return images, idx(folder, f"{name}-labels-idx1-ubyte", 8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    for split in ("train", "test"):
        images, labels = (part[: options.limit] for part in read(options.folder, split))
        for label in np.unique(labels):
            (options.dir / split / str(label)).mkdir(parents=True, exist_ok=True)
        for index, (image, label) in enumerate(zip(images, labels)):
            Image.fromarray(image).save(options.dir / split / str(label) / f"{index:05}.png")
        print(f"{split}: {len(labels)} pictures")


if __name__ == "__main__":
    main()
