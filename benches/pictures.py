"""Writes a data set of IDX files, such as Fashion-MNIST, as a folder of pictures: DIR/train/CLASS/NUMBER.png and DIR/test/….

    pip install numpy pillow
    python benches/pictures.py FOLDER DIR [--limit N]

FOLDER has the four files of the data set, gzipped or not. `--limit` writes the first N pictures of each split.
"""

import argparse
import gzip
import pathlib

import numpy as np
from PIL import Image


def read(folder, name, header):
    path = next(path for path in (folder / name, folder / f"{name}.gz") if path.exists())
    data = path.read_bytes()
    return np.frombuffer(gzip.decompress(data) if path.suffix == ".gz" else data, np.uint8, offset=header)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    for split, name in (("train", "train"), ("test", "t10k")):
        labels = read(options.folder, f"{name}-labels-idx1-ubyte", 8)[: options.limit]
        images = read(options.folder, f"{name}-images-idx3-ubyte", 16).reshape(-1, 28, 28)[: options.limit]
        for label in np.unique(labels):
            (options.dir / split / str(label)).mkdir(parents=True, exist_ok=True)
        for index, (image, label) in enumerate(zip(images, labels)):
            Image.fromarray(image).save(options.dir / split / str(label) / f"{index:05}.png")
        print(f"{split}: {len(labels)} pictures")


if __name__ == "__main__":
    main()
