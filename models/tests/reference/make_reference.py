"""Computes a reference file with PyTorch in float64, as README.md describes.

usage: make_reference.py NAME…              writes NAME.json beside this file
       make_reference.py --check NAME…      compares with the NAME.json that is there, writes nothing
       make_reference.py --bf16 NAME…       measures autocast's deviation from NAME.json, writes bf16.json
Networks: those of networks.py, and of torchvision_networks.py (NAME_imagenet; needs torchvision). Dropout is off.
"""

import json
import math
import pathlib
import sys

import numpy
import torch
from networks import NETWORKS, image_shape
from torch import nn
from torch.nn import functional as F

BATCH = 8
HERE = pathlib.Path(__file__).parent


def unit_interval(name, count):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    with numpy.errstate(over="ignore"):
        z = numpy.uint64(h) + numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    return (z >> numpy.uint64(40)).astype(numpy.float64) / 2**24


def fill(model):
    """The formula's weights, rounded to float32."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            u = unit_interval(name, parameter.numel())
            if parameter.dim() >= 2:
                value = (2 * u - 1) * math.sqrt(6 / (parameter.numel() // parameter.shape[0]))
            elif name.endswith("weight"):
                value = 0.5 + u
            else:
                value = (2 * u - 1) * 0.1
            value = torch.from_numpy(value.astype(numpy.float32)).reshape(parameter.shape)
            parameter.copy_(value.to(parameter.dtype))


def macs(model, x):
    """Multiply-adds of convolutions and linear layers."""
    total = 0

    def count(module, _, output):
        nonlocal total
        total += output.numel() * (module.weight.numel() // module.weight.shape[0])

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    model.eval()(x)
    for hook in hooks:
        hook.remove()
    return total


def network(name):
    """Returns our name of the network, the network without dropout, the shape of an image and the frozen modules."""
    if name.endswith("_imagenet"):
        import torchvision_networks

        if name in torchvision_networks.FROZEN:
            name, shape, frozen = torchvision_networks.FROZEN[name]
            return name, torchvision_networks.NETWORKS[name][0](), shape, frozen
        constructor, shape = torchvision_networks.NETWORKS[name]
        return name, constructor(), shape, []
    model = NETWORKS[name]()
    model.dropout = 0
    return name, model, image_shape(name), []


def train_mode(model, frozen):
    model.train()
    if frozen:
        import torchvision_networks

        torchvision_networks.freeze(model, frozen)
    return model


def values(name, dtype, autocast=False):
    name, model, shape, frozen = network(name)
    model = model.to(dtype)
    fill(model)
    train_mode(model, frozen)
    x = unit_interval("input", BATCH * math.prod(shape))
    x = 1.7 * (2 * x - 1).astype(numpy.float32).astype(numpy.float64)
    x = torch.from_numpy(x).reshape(BATCH, *shape).to(dtype)
    result = {
        "model": name,
        "params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "macs": macs(model, x[:1]),
        "input": "input",
        "batch": BATCH,
        "image": list(shape),
        "frozen": frozen,
        "state": [[k, list(v.shape)] for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")],
    }
    if autocast:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = train_mode(model, frozen)(x)
    logits = logits.to(dtype)
    loss = F.cross_entropy(logits, torch.arange(BATCH) % 10)
    loss.backward()
    result["train_logits"] = logits.tolist()
    result["loss"] = loss.item()
    # A parameter that the network does not use has no gradient.
    result["grad_l2"] = {k: p.grad.norm().item() for k, p in model.named_parameters() if p.grad is not None}
    buffers = {k: b.double() for k, b in model.named_buffers() if not k.endswith("num_batches_tracked")}
    result["running_mean_and_l2"] = {k: [b.mean().item(), b.norm().item()] for k, b in buffers.items()}
    result["eval_logits"] = model.eval()(x).tolist()
    return result


def deviation(exact, single):
    """Returns float32's deviation: of logits and loss in units of their largest value, of gradient norms relative."""

    def logits(key):
        want, got = numpy.array(exact[key]), numpy.array(single[key])
        return float(abs(got - want).max() / max(1.0, abs(want).max()))

    largest = max(exact["grad_l2"].values())
    norms = [abs(single["grad_l2"][k] / v - 1) for k, v in exact["grad_l2"].items() if v >= 1e-6 * largest]
    return {
        "train_logits": logits("train_logits"),
        "eval_logits": logits("eval_logits"),
        "loss": abs(single["loss"] - exact["loss"]),
        "worst_grad_l2": max(norms),
    }


def bf16_deviation(name):
    """Returns autocast's deviation from NAME.json: of logits and gradient norms as `|a - b| / |b|`, of the loss absolutely."""
    exact = json.loads((HERE / f"{name}.json").read_text())
    narrow = values(name, torch.float32, autocast=True)
    names = list(exact["grad_l2"])

    def apart(got, want):
        got, want = numpy.array(got), numpy.array(want)
        return float(numpy.linalg.norm(got - want) / numpy.linalg.norm(want))

    return {
        "train_logits": apart(narrow["train_logits"], exact["train_logits"]),
        "loss": abs(narrow["loss"] - exact["loss"]),
        "grad_l2": apart([narrow["grad_l2"][k] for k in names], [exact["grad_l2"][k] for k in names]),
    }


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return value


def differences(old, new, path=""):
    if isinstance(old, dict):
        yield from ([] if old.keys() == new.keys() else [f"{path}: other keys"])
        for key in old.keys() & new.keys():
            yield from differences(old[key], new[key], f"{path}/{key}")
    elif isinstance(old, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new)):
            yield from differences(a, b, f"{path}/{index}")
    elif isinstance(old, float):
        # The files have nine digits. A vanishing gradient is rounding alone.
        if abs(old - new) > 1e-6 * abs(old) + 1e-7:
            yield f"{path}: {old} there, {new} here"
    elif old != new:
        yield f"{path}: {old} there, {new} here"


def main():
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    if "--bf16" in sys.argv:
        found = {name: {k: float(f"{v:.2g}") for k, v in bf16_deviation(name).items()} for name in names}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in names)
        (HERE / "bf16.json").write_text("{\n" + lines + "\n}\n")
        return
    for name in names:
        exact = values(name, torch.float64)
        path = HERE / f"{name}.json"
        if "--check" in sys.argv:
            old = json.loads(path.read_text())
            old.pop("pytorch_f32_deviation")
            # Files that were made before shapes differed and modules were frozen.
            old.setdefault("image", list(image_shape(name)))
            old.setdefault("frozen", [])
            found = list(differences(old, rounded(exact)))
            print(f"{name}: {'equal' if not found else chr(10).join(found[:10])}")
            continue
        exact["pytorch_f32_deviation"] = deviation(exact, values(name, torch.float32))
        path.write_text(json.dumps(rounded(exact)) + "\n")
        print(f"{name}: {exact['params']} parameters, {exact['macs']} multiply-adds, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
