"""Writes auto_augment.json from torchvision: python make_auto_augment_golden.py

The three policies of `AutoAugment`, the strengths of its operations for an image of 10 x 12 pixels, and the result of `Invert`.
"""

import json
import pathlib

import torch
from torchvision.transforms import AutoAugment, AutoAugmentPolicy
from torchvision.transforms.functional import invert

BINS = 10


def main():
    policies = {}
    for policy in AutoAugmentPolicy:
        pairs = AutoAugment(policy)._get_policies(policy)
        policies[policy.value] = [[[name, p, bin or 0] for name, p, bin in pair] for pair in pairs]
    strengths = {}
    for name, (magnitudes, _) in AutoAugment()._augmentation_space(BINS, (10, 12)).items():
        strengths[name] = [float(m) for m in magnitudes] if magnitudes.ndim else [0.0]
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    inverted = bytes(invert(pixels).flatten().tolist()).hex()
    path = pathlib.Path(__file__).parent / "auto_augment.json"
    path.write_text(json.dumps({"policies": policies, "strengths": strengths, "inverted": inverted}) + "\n")


main()
