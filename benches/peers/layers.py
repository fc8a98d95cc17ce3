"""Times each layer in PyTorch for benches/benches/layers.

usage: layers.py VARIANT BATCH STEPS THREADS LAYERS

VARIANT is nchw, channels_last or channels_last_bf16 (autocast; images are bf16, weights f32). LAYERS is JSON, a list of {"conv": [in, out, kernel, stride, side]}, {"norm": [channels, side, relu, add]},
{"mean": [channels, side]} and {"linear": [in, out]}; side is the input's, relu and add are 0 or 1.
Prints one line of JSON with medians in milliseconds for each layer: {"forward", "data", "weight"}. For convolutions and
linear layers the gradients of data and weight (with the bias) are timed separately, for other layers together as "data".
"""

import json
import statistics
import sys
import time

import torch
from torch.nn import functional as F


def tensors(layer, batch, layout, dtype):
    """Returns the inputs that need a gradient (data first), and the function of these inputs."""
    image = lambda c, side: torch.randn(batch, c, side, side).to(dtype, memory_format=layout).requires_grad_()
    vector = lambda c: torch.rand(c).requires_grad_()
    [(kind, numbers)] = layer.items()
    if kind == "conv":
        c, out, kernel, stride, side = numbers
        weight = (0.01 * torch.randn(out, c, kernel, kernel)).to(memory_format=layout).requires_grad_()
        return [image(c, side), weight], lambda x, w: F.conv2d(x, w, None, stride, kernel // 2)
    if kind == "norm":
        c, side, relu, add = numbers
        running = torch.zeros(c), torch.ones(c)

        def norm(x, w, b, residual=None):
            y = F.batch_norm(x, *running, w, b, training=True)
            y = y if residual is None else y + residual
            return F.relu(y) if relu else y

        return [image(c, side), vector(c), vector(c)] + ([image(c, side)] if add else []), norm
    if kind == "mean":
        return [image(*numbers)], lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)
    inputs, outputs = numbers
    x = torch.randn(batch, inputs).to(dtype).requires_grad_()
    weight = (0.01 * torch.randn(outputs, inputs)).requires_grad_()
    return [x, weight, vector(outputs)], F.linear


def main():
    variant, batch, steps, threads, layers = sys.argv[1], *map(int, sys.argv[2:5]), json.loads(sys.argv[5])
    torch.set_num_threads(threads)
    layout = torch.contiguous_format if variant == "nchw" else torch.channels_last
    dtype = torch.bfloat16 if variant.endswith("bf16") else torch.float32
    found = []
    for layer in layers:
        torch.manual_seed(0)
        inputs, operation = tensors(layer, batch, layout, dtype)

        def run(*inputs):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                return operation(*inputs)

        output = run(*inputs)
        grad = torch.randn_like(output)  # in the output's memory format
        apart = not {"conv", "linear"}.isdisjoint(layer)
        parts = {
            "forward": lambda: run(*inputs),
            "data": lambda: torch.autograd.grad(output, inputs[:1] if apart else inputs, grad, retain_graph=True),
        }
        if apart:
            parts["weight"] = lambda: torch.autograd.grad(output, inputs[1:], grad, retain_graph=True)
        times = {part: [] for part in parts}
        for step in range(steps + 1):
            for part, work in parts.items():
                start = time.perf_counter()
                result = work()
                end = time.perf_counter()
                del result
                if step > 0:
                    times[part].append(1000 * (end - start))
        found.append({part: statistics.median(values) for part, values in times.items()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
