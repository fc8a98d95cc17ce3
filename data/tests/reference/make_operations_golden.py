"""Writes operations.jsonl from torchvision 0.29: python make_operations_golden.py

One line per operation, strength and image shape: torchvision's `_apply_op` on a uint8 tensor, the result as hexadecimal digits.
The strengths are those of the spaces of TrivialAugmentWide and RandAugment. `spaces` has all of these strengths.
"""

import json
import pathlib

import torch
from torchvision.transforms import InterpolationMode, RandAugment, TrivialAugmentWide
from torchvision.transforms.autoaugment import _apply_op
from torchvision.transforms.functional import adjust_hue

BINS = 31
SHAPES = [(3, 10, 12), (1, 7, 9)]
FACTORS = ("Brightness", "Color", "Contrast", "Sharpness")


def image(shape):
    count = shape[0] * shape[1] * shape[2]
    values = [(i * 37 + i // 5 * 11) % 180 + 20 for i in range(count)]
    return torch.tensor(values, dtype=torch.uint8).reshape(shape)


def strengths(magnitudes, signed, bins):
    if magnitudes.ndim == 0:
        return [0.0]
    chosen = [float(magnitudes[i].item()) for i in bins]
    return chosen + [-m for m in chosen if m != 0] if signed else chosen


def main():
    lines = []
    for name, space in [
        ("trivial", TrivialAugmentWide()._augmentation_space(BINS)),
        ("rand", RandAugment()._augmentation_space(BINS, (10, 12))),
    ]:
        every = {op: strengths(m, s, range(BINS)) for op, (m, s) in space.items()}
        lines.append({"space": name, "operations": list(space), "strengths": every})
    for shape in SHAPES:
        for op, (magnitudes, signed) in TrivialAugmentWide()._augmentation_space(BINS).items():
            # Two in the middle: the largest translation moves the whole image away.
            for strength in strengths(magnitudes, signed, (4, 9, 17)):
                out = _apply_op(image(shape), op, strength, InterpolationMode.NEAREST, None)
                digits = bytes(out.flatten().tolist()).hex()
                lines.append({"operation": op, "strength": strength, "shape": shape, "result": digits})
    # `ColorJitter`'s hue is no operation of the two policies. Colours, greys, and both ends of the range.
    for shape in [(3, 10, 12), (3, 6, 6)]:
        picture = image(shape) if shape[1] == 10 else (torch.arange(108) * 7 % 256).to(torch.uint8).reshape(shape)
        picture[:, 0] = picture[:1, 0]
        for factor in (-0.5, -0.17, 0.03, 0.25, 0.5):
            digits = bytes(adjust_hue(picture, factor).flatten().tolist()).hex()
            before = bytes(picture.flatten().tolist()).hex()
            lines.append({"hue": factor, "shape": shape, "before": before, "result": digits})
    # A flat channel, and one that is too uniform to be equalized.
    for op in ("AutoContrast", "Equalize"):
        flat = torch.full((1, 4, 4), 77, dtype=torch.uint8)
        out = _apply_op(flat, op, 0.0, InterpolationMode.NEAREST, None)
        lines.append({"operation": op, "flat": 77, "shape": (1, 4, 4), "result": bytes(out.flatten().tolist()).hex()})
    # Enough pixels of few values, so that equalizing changes something.
    many = (torch.arange(40 * 40) % 23 * 3).to(torch.uint8).reshape(1, 40, 40)
    out = _apply_op(many, "Equalize", 0.0, InterpolationMode.NEAREST, None)
    table = {int(k): int(v) for k, v in zip(many.flatten(), out.flatten())}
    lines.append({"equalized": [[k, table[k]] for k in sorted(table)]})
    path = pathlib.Path(__file__).parent / "operations.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


main()
