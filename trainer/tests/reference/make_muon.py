"""Writes muon.json from real PyTorch: python make_muon.py

Six steps of torch.optim.Muon with adjust_lr_fn="match_rms_adamw" on matrices of three shapes. PyTorch orthogonalizes in bfloat16. For the values in float64, its own code runs with float64 in that place; "bf16"
holds the values of the unchanged code.
"""

import json
import math
import pathlib
import types

import torch
import torch.optim._muon as module

LR, STEPS = 0.1, 6
OPTIONS = dict(lr=LR, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
in_float64 = types.SimpleNamespace(**{**vars(torch), "bfloat16": torch.float64})


def values(rows, columns, dtype, nesterov):
    count = rows * columns
    start = [math.cos(0.5 * i) for i in range(count)]
    weight = torch.tensor(start, dtype=dtype).view(rows, columns).requires_grad_()
    optimizer = torch.optim.Muon([weight], nesterov=nesterov, **OPTIONS)
    steps = []
    for step in range(STEPS):
        gradient = [math.sin(1.0 + 0.7 * step + 1.3 * i) + math.cos(0.3 * i * i) for i in range(count)]
        weight.grad = torch.tensor(gradient, dtype=dtype).view(rows, columns)
        optimizer.step()
        steps.append(weight.detach().flatten().tolist())
    return steps


golden = {
    "source": f"PyTorch {torch.__version__}, torch.optim.Muon",
    "start": "p[i] = cos(0.5 i)",
    "gradient": "g[s][i] = sin(1.0 + 0.7 s + 1.3 i) + cos(0.3 i²), s = step from 0, i = index from 0",
    "lr": LR,
    "cases": [],
}
for rows, columns in [(4, 6), (7, 3), (5, 5)]:
    for nesterov in [True, False]:
        bf16 = values(rows, columns, torch.float32, nesterov)
        module.torch = in_float64
        steps = values(rows, columns, torch.float64, nesterov)
        module.torch = torch
        golden["cases"].append({"shape": [rows, columns], "nesterov": nesterov, "steps": steps, "bf16": bf16})

path = pathlib.Path(__file__).with_name("muon.json")
path.write_text(json.dumps(golden, indent=1) + "\n")
