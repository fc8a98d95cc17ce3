"""Writes class_weights.json from real PyTorch: python make_class_weights.py

Losses and gradients of torch.nn.functional.cross_entropy(logits, targets, weight, label_smoothing=...) in float64, for the logits
and labels of losses.json. Mixed targets are class probabilities.
"""

import json
import math
import pathlib

import torch
from torch.nn.functional import cross_entropy, one_hot

logits = [[3 * math.cos(0.9 * i + 1.7 * j) for j in range(10)] for i in range(4)]
labels = torch.tensor([0, 3, 7, 9])
weights = [0.25 + 0.5 * j for j in range(10)]
weights[3] = 0.0
probabilities = 0.3 * one_hot(labels, 10).double() + 0.7 * one_hot(labels.flip(0), 10).double()


def case(targets, smoothing):
    values = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(values, targets, torch.tensor(weights, dtype=torch.float64), label_smoothing=smoothing)
    loss.backward()
    return {"loss": loss.item(), "gradient": values.grad.flatten().tolist()}


golden = {
    "source": f"PyTorch {torch.__version__}, torch.nn.functional.cross_entropy",
    "weights": weights,
    "weighted": case(labels, 0.0),
    "weighted_and_smoothing_0.1": case(labels, 0.1),
    "mixup_0.3_with_reversed_batch": case(probabilities, 0.0),
    "mixup_and_smoothing_0.1": case(probabilities, 0.1),
}
pathlib.Path(__file__).with_name("class_weights.json").write_text(json.dumps(golden, indent=1) + "\n")
