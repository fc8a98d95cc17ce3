"""Times PyTorch's training step for benches/benches/step: forward, backward, SGD with Nesterov momentum, cross-entropy.

usage: step.py MODEL BATCH STEPS THREADS [VARIANT]
       THREADS: threads of the CPU; 0 measures on the GPU
       VARIANT: measures only this variant
       step.py --available cuda|cpu: exits with 1 and says why if PyTorch cannot measure `best` there

The networks are those of models/tests/reference/networks.py, with the same parameters and multiply-adds as ours.
Prints one line of JSON: for each variant medians in milliseconds, the seconds of the first step, and on a GPU the peak
memory of PyTorch's allocator, {"nchw": {"forward", "backward", "step", "first_step_s", "peak_bytes"}, …}.
Variants on the CPU: nchw, channels_last and channels_last_bf16 (autocast). On a GPU all are channels_last: f32 (TF32 allowed)
and bf16 (autocast), and f32_compiled and bf16_compiled (torch.compile on top).
`best`, only when it is named, is the fastest way: bf16 autocast, channels_last, torch.compile(mode="max-autotune") of network and
loss, which records CUDA graphs, and a fused SGD. STEPS steps are queued and waited for once. {"best": {"step", "first_step_s",
"peak_bytes"}} has the median over ROUNDS such measurements.
"""

import json
import pathlib
import statistics
import sys
import time

try:
    import torch
    from torch.nn import functional as F
except ImportError as error:
    sys.exit(f"no PyTorch: {error}")

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "models" / "tests" / "reference"))
from networks import NETWORKS, image_shape  # noqa: E402

ROUNDS = 3


def available(device):
    """Returns why `best` cannot be measured on this device, or None."""
    if not hasattr(torch, "compile"):
        return f"PyTorch {torch.__version__} has no torch.compile"
    if device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU"
    return None


def measure_best(name, batch, steps, device):
    torch.manual_seed(0)
    model = NETWORKS[name]().to(device, memory_format=torch.channels_last)
    x = torch.randn(batch, *image_shape(name), device=device).to(memory_format=torch.channels_last)
    y = torch.arange(batch, device=device) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    @torch.compile(mode="max-autotune")
    def loss_of(x, y):
        with torch.autocast(device, torch.bfloat16):
            return F.cross_entropy(model(x), y)

    def seconds(count):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(x, y).backward()
            optimizer.step()
        wait()
        return time.perf_counter() - start

    first = seconds(1)
    # CUDA graphs are recorded in the second and third step.
    seconds(5)
    times = {"step": 1000 * statistics.median(seconds(steps) for _ in range(ROUNDS)) / steps, "first_step_s": first}
    if device == "cuda":
        times["peak_bytes"] = torch.cuda.max_memory_reserved()
    return times


def measure(name, batch, steps, device, layout, precision, compiled):
    torch.manual_seed(0)
    model = NETWORKS[name]().to(device)
    x = torch.randn(batch, *image_shape(name), device=device)
    y = torch.arange(batch, device=device) % 10
    model, x = (t.to(memory_format=layout) for t in (model, x))
    # foreach is PyTorch's default on a GPU.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4)
    network = torch.compile(model) if compiled else model

    def now():
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    forward, backward, step = [], [], []
    for _ in range(steps + (5 if device == "cuda" else 1)):
        start = now()
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(network(x), y)
        middle = now()
        loss.backward()
        end = now()
        optimizer.step()
        done = now()
        forward.append(middle - start)
        backward.append(end - middle)
        step.append(done - start)
    median = lambda times: 1000 * statistics.median(times[-steps:])
    times = {"forward": median(forward), "backward": median(backward), "step": median(step), "first_step_s": step[0]}
    if device == "cuda":
        times["peak_bytes"] = torch.cuda.max_memory_reserved()
    return times


def main():
    if sys.argv[1:2] == ["--available"]:
        sys.exit(available(sys.argv[2]))
    name, batch, steps, threads = sys.argv[1], *map(int, sys.argv[2:5])
    if threads == 0:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        variants = {
            "f32": ("f32", False),
            "bf16": ("bf16", False),
            "f32_compiled": ("f32", True),
            "bf16_compiled": ("bf16", True),
        }
        run = lambda precision, compiled: measure(
            name, batch, steps, "cuda", torch.channels_last, precision, compiled
        )
    else:
        torch.set_num_threads(threads)
        variants = {
            "nchw": (torch.contiguous_format, "f32"),
            "channels_last": (torch.channels_last, "f32"),
            "channels_last_bf16": (torch.channels_last, "bf16"),
        }
        run = lambda layout, precision: measure(name, batch, steps, "cpu", layout, precision, False)
    if sys.argv[5:] == ["best"]:
        print(json.dumps({"best": measure_best(name, batch, steps, "cpu" if threads else "cuda")}))
        return
    if len(sys.argv) > 5:
        variants = {sys.argv[5]: variants[sys.argv[5]]}
    print(json.dumps({variant: run(*arguments) for variant, arguments in variants.items()}))


if __name__ == "__main__":
    main()
