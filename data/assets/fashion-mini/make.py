"""Cuts fashion-mini out of Fashion-MNIST: the first 700 training and 100 test images of each class, in file order.

    pip install zopfli==0.4.3 numpy
    python make.py FOLDER      FOLDER holds the four official IDX .gz files

The four files are written beside this script. Running it again gives the same bytes.
"""

import gzip
import pathlib
import sys

import numpy as np
import zopfli.gzip

CLASSES = 10
SPLITS = {"train": 700, "t10k": 100}  # images a class


def read(path, header):
    """Returns the values of an IDX file of uint8 after checking its magic number."""
    raw = gzip.decompress(path.read_bytes())
    dims = header[3]
    assert raw[:4] == header, f"{path}: not an IDX file of uint8 with {dims} dimensions"
    shape = np.frombuffer(raw, ">u4", dims, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


def write(path, header, values):
    """Writes an IDX file, compressed as far as deflate goes."""
    raw = header + np.asarray(values.shape, ">u4").tobytes() + values.tobytes()
    packed = zopfli.gzip.compress(raw, numiterations=15)
    assert gzip.decompress(packed) == raw
    path.write_bytes(packed)
    print(f"{path.name}: {len(values)} records, {len(packed)} bytes")


def main():
    source = pathlib.Path(sys.argv[1])
    here = pathlib.Path(__file__).parent
    for split, per_class in SPLITS.items():
        images = read(source / f"{split}-images-idx3-ubyte.gz", b"\0\0\x08\x03")
        labels = read(source / f"{split}-labels-idx1-ubyte.gz", b"\0\0\x08\x01")
        first = [np.flatnonzero(labels == c)[:per_class] for c in range(CLASSES)]
        keep = np.sort(np.concatenate(first))
        assert len(keep) == CLASSES * per_class
        write(here / f"{split}-images-idx3-ubyte.gz", b"\0\0\x08\x03", images[keep])
        write(here / f"{split}-labels-idx1-ubyte.gz", b"\0\0\x08\x01", labels[keep])


if __name__ == "__main__":
    main()
