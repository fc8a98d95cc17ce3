"""Measures the peak memory of PyTorch's training step for benches/benches/memory.rs.

usage: memory.py MODEL BATCH STEPS THREADS VARIANT        VARIANT: nchw, channels_last,
       channels_last_bf16 (autocast)

The networks are those of models/tests/reference/networks.py. Prints one line of JSON, in bytes of resident memory (Linux):
{"before": with PyTorch, the model, the optimizer and the batch, "peak": the peak during the steps}.
"""

import json
import pathlib
import sys

import torch
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "models" / "tests" / "reference"))
from networks import NETWORKS, image_shape  # noqa: E402


def resident(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {key}")


def main():
    name, batch, steps, threads, variant = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layout = torch.contiguous_format if variant == "nchw" else torch.channels_last
    model = NETWORKS[name]().to(memory_format=layout)
    x = torch.randn(batch, *image_shape(name)).to(memory_format=layout)
    y = torch.arange(batch) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4)
    # The peak so far is that of building.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.endswith("bf16")):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(json.dumps({"before": before, "peak": resident("VmHWM")}))


if __name__ == "__main__":
    main()
