"""Times PyTorch's optimizer step, clipping and weight average for benches/benches/optimizer.rs.

usage: optimizer.py MODEL STEPS THREADS

The networks are those of models/tests/reference/networks.py. Gradients do not change; steps of all variants take turns.
Prints one line of JSON with the median in milliseconds for each part ("sgd", "adamw", "muon", "clip", "ema") and
variant, {"sgd": {"for_loop": 1.0, "foreach": …, "fused": …}, …}. A variant that this version of PyTorch does not have is left out.
"""

import json
import pathlib
import statistics
import sys
import time
import types

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "models" / "tests" / "reference"))
from networks import NETWORKS  # noqa: E402


def parts(name):
    """Returns the functions to time by part and variant."""

    def parameters():
        torch.manual_seed(0)
        parameters = list(NETWORKS[name]().parameters())
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        return parameters

    sgd = lambda **kind: torch.optim.SGD(
        parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4, **kind
    )
    adamw = lambda **kind: torch.optim.AdamW(parameters(), lr=1e-3, weight_decay=1e-2, **kind)
    kinds = {"for_loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    found = {"sgd": {}, "adamw": {}, "muon": {}, "clip": {}, "ema": {}}
    for part, make in ("sgd", sgd), ("adamw", adamw):
        for variant, kind in kinds.items():
            try:
                found[part][variant] = make(**kind).step
            except (RuntimeError, TypeError):
                pass
    if hasattr(torch.optim, "Muon"):
        found["muon"] = {variant: muon(parameters(), variant == "f32") for variant in ("bf16", "f32")}
    clipped = parameters()
    for variant in "for_loop", "foreach":
        # A limit that is never reached would not save work: the factor is applied all the same.
        found["clip"][variant] = lambda foreach=variant == "foreach": torch.nn.utils.clip_grad_norm_(
            clipped, 1e9, foreach=foreach
        )
    averaged, followed = ([p.detach() for p in parameters()] for _ in range(2))

    def ema_loop():
        for average, value in zip(averaged, followed):
            average.lerp_(value, 1e-3)

    found["ema"] = {"for_loop": ema_loop, "foreach": lambda: torch._foreach_lerp_(averaged, followed, 1e-3)}
    return found


def muon(parameters, in_f32):
    """Returns a step of Muon for the matrices of hidden layers and of AdamW for the rest, as trainer/src/optim/muon.rs.

    Muon computes in bfloat16; if in_f32 is true, the same code computes in float32.
    """
    import torch.optim._muon as module

    last = [p for p in parameters if p.dim() >= 2][-1]
    hidden = [p for p in parameters if p.dim() >= 2 and p is not last and (p.dim() == 2 or p.shape[1] > 3)]
    matrices = [p.detach().flatten(1).requires_grad_() for p in hidden]
    for matrix, parameter in zip(matrices, hidden):
        matrix.grad = parameter.grad.flatten(1)
    others = [p for p in parameters if all(p is not q for q in hidden)]
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-3, weight_decay=1e-2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-3, weight_decay=1e-2, fused=True),
    ]
    namespace = types.SimpleNamespace(**{**vars(torch), **({"bfloat16": torch.float32} if in_f32 else {})})

    def step():
        module.torch = namespace
        for optimizer in optimizers:
            optimizer.step()
        module.torch = torch

    return step


def main():
    name, steps, threads = sys.argv[1], *map(int, sys.argv[2:4])
    torch.set_num_threads(threads)
    found = parts(name)
    times = {part: {variant: [] for variant in variants} for part, variants in found.items()}
    with torch.no_grad():
        for step in range(steps + 1):
            for part, variants in found.items():
                for variant, run in variants.items():
                    start = time.perf_counter()
                    run()
                    if step > 0:
                        times[part][variant].append(1000 * (time.perf_counter() - start))
    print(json.dumps({p: {v: statistics.median(t) for v, t in variants.items()} for p, variants in times.items()}))


if __name__ == "__main__":
    main()
