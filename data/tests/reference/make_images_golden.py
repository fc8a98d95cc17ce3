"""Writes images.jsonl from PIL and torchvision: python make_images_golden.py

Lines with `file`: a PNG or JPEG as hexadecimal digits, and the pixels of PIL's `convert("RGB")`, row by row. Lines with `crop`:
torchvision's `resized_crop` of a PIL image. Lines with `resize`: `Resize(shorter side)` and `CenterCrop`. Lines with
`ten_crop`: `Resize(shorter side)` and `TenCrop`. Lines with `units`:
`RandomResizedCrop.get_params`, whose random numbers are those of the list.
"""

import io
import json
import pathlib
import random

import numpy
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, RandomResizedCrop, Resize, TenCrop
from torchvision.transforms import functional as F


def image(width, height):
    """A picture with smooth and sharp parts."""
    y, x = numpy.mgrid[0:height, 0:width]
    planes = [
        x * 255 // max(width - 1, 1),
        (y * 11 + x * 3) % 256,
        numpy.where((x // 5 + y // 4) % 2, 230, 20) + (x * y) % 17,
    ]
    return Image.fromarray(numpy.stack(planes, axis=-1).astype(numpy.uint8))


def files():
    picture = image(25, 19)
    ramp = Image.fromarray(numpy.arange(25 * 19, dtype=numpy.uint32).reshape(19, 25).astype(numpy.uint8))
    alpha = ramp.point(lambda value: 255 - value)
    transparent, grey_alpha = picture.copy(), ramp.convert("LA")
    transparent.putalpha(alpha)
    grey_alpha.putalpha(alpha)
    palette = picture.quantize(13)
    for name, picture_, options in [
        ("png", picture, {}),
        ("png grey", ramp, {}),
        ("png 1 bit", picture.convert("1"), {}),
        ("png transparent", transparent, {}),
        ("png grey transparent", grey_alpha, {}),
        ("png palette", palette, {}),
        ("png palette, 4 bits", palette, {"bits": 4}),
        ("png palette with a transparent colour", palette, {"transparency": 3}),
        ("png with a transparent colour", picture, {"transparency": (0, 0, 20)}),
    ]:
        yield name, picture_, {"format": "PNG", **options}
    jpeg = {"format": "JPEG", "quality": 90}
    yield "jpeg 4:4:4", picture, {**jpeg, "subsampling": 0}
    yield "jpeg 4:2:2", picture, {**jpeg, "subsampling": 1}
    yield "jpeg 4:2:0", picture, {**jpeg, "subsampling": 2}
    yield "jpeg progressive", picture, {**jpeg, "subsampling": 2, "progressive": True}
    yield "jpeg grey", ramp, jpeg
    yield "jpeg cmyk", picture.convert("CMYK"), jpeg
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    yield "jpeg rotated in exif", picture, {**jpeg, "subsampling": 0, "exif": exif}


def main():
    lines = []
    for name, picture, options in files():
        buffer = io.BytesIO()
        picture.save(buffer, **options)
        pixels = Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")
        size = [pixels.height, pixels.width]
        lines.append({"file": name, "bytes": buffer.getvalue().hex(), "size": size, "pixels": pixels.tobytes().hex()})
    for (width, height), crop, target in [
        ((25, 19), (0, 0, 19, 25), (8, 8)),
        ((25, 19), (0, 0, 19, 25), (30, 41)),
        ((25, 19), (3, 4, 11, 17), (16, 16)),
        ((25, 19), (5, 0, 1, 25), (7, 7)),
        ((25, 19), (2, 2, 12, 12), (12, 5)),
        ((25, 19), (2, 2, 12, 12), (12, 12)),
        ((97, 61), (1, 2, 60, 93), (9, 14)),
        ((3, 200), (0, 0, 200, 3), (8, 8)),
    ]:
        result = F.resized_crop(image(width, height), *crop, target)
        lines.append({"crop": crop, "size": [height, width], "target": target, "pixels": result.tobytes().hex()})
    for (width, height), side, cut in [((25, 19), 12, 10), ((19, 25), 12, 11), ((40, 13), 15, 15), ((16, 16), 16, 9), ((97, 61), 16, 14)]:
        result = CenterCrop(cut)(Resize(side)(image(width, height)))
        lines.append({"resize": side, "size": [height, width], "target": [cut, cut], "pixels": result.tobytes().hex()})
    for (width, height), side, target in [((25, 19), 12, (10, 11)), ((19, 26), 13, (13, 8))]:
        views = TenCrop(target)(Resize(side)(image(width, height)))
        pixels = b"".join(view.tobytes() for view in views)
        lines.append({"ten_crop": side, "size": [height, width], "target": target, "pixels": pixels.hex()})
    generator = random.Random(1)
    original = torch.Tensor.uniform_, torch.randint
    for size in [[375, 500], [500, 375], [32, 32], [100, 1000], [1000, 100], [3, 2], [1, 1]]:
        for scale in [0.08, 0.25, 0.9]:
            for _ in range(4):
                units = [round(generator.random(), 6) for _ in range(40)]
                drawn = iter(units)
                torch.Tensor.uniform_ = lambda tensor, low, high: tensor.fill_(low + (high - low) * next(drawn))
                torch.randint = lambda low, high, size: torch.tensor([int(low + (high - low) * next(drawn))])
                region = RandomResizedCrop.get_params(torch.empty(3, *size), [scale, 1.0], [3 / 4, 4 / 3])
                torch.Tensor.uniform_, torch.randint = original
                used = 40 - len(list(drawn))
                lines.append({"units": units[:used], "size": size, "scale": scale, "region": region})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    pathlib.Path(__file__).with_name("images.jsonl").write_text(text)


if __name__ == "__main__":
    main()
