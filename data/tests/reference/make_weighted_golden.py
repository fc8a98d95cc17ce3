"""Writes weighted_sampler.json from real PyTorch: python make_weighted_golden.py

The indices of torch.utils.data.WeightedRandomSampler(weights, count, generator=Generator().manual_seed(seed)) with
weights[i] = (i * 7919 + 5) % 13 / 7, which has zeros; long ones as their ends and a SHA-256 of the little-endian uint32 elements.
"""

import hashlib
import json
import pathlib

import numpy
import torch
from torch.utils.data import WeightedRandomSampler

ENDS = 16


def case(n, count, seed):
    weights = [(i * 7919 + 5) % 13 / 7 for i in range(n)]
    order = list(WeightedRandomSampler(weights, count, generator=torch.Generator().manual_seed(seed)))
    row = {"n": n, "count": count, "seed": seed}
    if count <= 100:
        return row | {"order": order}
    digest = hashlib.sha256(numpy.array(order).astype("<u4").tobytes()).hexdigest()
    return row | {"first": order[:ENDS], "last": order[-ENDS:], "sha256": digest}


seeds = [0, 1, 42, 2**31 + 5, 2**32 + 7, 2**63 + 11]
sizes = [(2, 20), (10, 10), (13, 100), (1000, 1000), (50_000, 50_000), (7, 1000)]
cases = [case(n, count, seed) for n, count in sizes for seed in seeds]
rows = ",\n".join("    " + json.dumps(row) for row in cases)
source = json.dumps(f"PyTorch {torch.__version__}, torch.utils.data.WeightedRandomSampler")
text = f'{{\n  "source": {source},\n  "cases": [\n{rows}\n  ]\n}}\n'
pathlib.Path(__file__).with_name("weighted_sampler.json").write_text(text)
