"""Writes sampler_shuffled.json from real PyTorch: python make_sampler_golden.py [--wide]

permutations   torch.randperm(n, generator=Generator().manual_seed(seed)); long ones as their ends and a SHA-256 of
               the little-endian uint32 elements
shuffled       the indices of torch.utils.data.DistributedSampler(shuffle=True) on every rank

--wide prints what randperm_wide.jsonl holds: the same for the two lengths around PyTorch's switch to its other algorithm (2 GB of memory, a minute).
"""

import hashlib
import json
import pathlib
import sys

import torch
from torch.utils.data import DistributedSampler

ENDS = 16


def permutation(n, seed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    case = {"n": n, "seed": seed}
    if n <= 100:
        return case | {"order": order.tolist()}
    digest = hashlib.sha256(order.numpy().astype("<u4").tobytes()).hexdigest()
    return case | {"first": order[:ENDS].tolist(), "last": order[-ENDS:].tolist(), "sha256": digest}


def shuffled(n, world, seed, epoch, drop_last):
    ranks = []
    for rank in range(world):
        sampler = DistributedSampler(range(n), world, rank, shuffle=True, seed=seed, drop_last=drop_last)
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
    return {"n": n, "world": world, "seed": seed, "epoch": epoch, "drop_last": drop_last, "ranks": ranks}


if "--wide" in sys.argv:
    limit = (2**32 - 1) // 20
    for n in (limit - 1, limit):
        print(json.dumps(permutation(n, 5)))
    sys.exit()

seeds = [0, 1, 42, 2**31 + 5, 2**32 + 7, 2**63 + 11, 2**64 - 1]
golden = {
    "source": f"PyTorch {torch.__version__}, torch.randperm and torch.utils.data.DistributedSampler(shuffle=True)",
    "permutations": [permutation(n, s) for n in (0, 1, 2, 10, 1000, 50_000) for s in seeds],
    "shuffled": [
        shuffled(n, world, seed, epoch, drop_last)
        for n, world in ((0, 2), (3, 8), (10, 4), (23, 3), (24, 4))
        for seed, epoch in ((0, 0), (7, 3), (2**32 - 1, 2))
        for drop_last in (False, True)
    ],
}
rows = lambda key: ",\n".join("    " + json.dumps(row) for row in golden[key])
text = f'{{\n  "source": {json.dumps(golden["source"])},\n  "permutations": [\n{rows("permutations")}\n  ],\n'
text += f'  "shuffled": [\n{rows("shuffled")}\n  ]\n}}\n'
pathlib.Path(__file__).with_name("sampler_shuffled.json").write_text(text)
