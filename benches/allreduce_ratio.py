"""All-reduce compared with PyTorch's gloo: PYTHON benches/allreduce_ratio.py [--worlds 2,4] [--rounds 5] [--ms 300] [--markdown]

Runs `trainer bench allreduce` over every backend and benches/peers/allreduce_gloo.py in turns (with the Python that runs
this script, which needs torch). Prints medians over the turns, and how many times faster than gloo each backend is.
Arrays lie where training keeps its gradients (`--memory shared`); `shm:ordinary` uses ordinary memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = "4,64,1024,16384,65536,1048576,4194304,47185920"


def times(command, variables=None):
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | (variables or {}))
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}{run.stdout}")
    results = json.loads(run.stdout)["results"]
    if any(row["wrong"] for row in results):
        sys.exit(f"{' '.join(command)} computed wrong sums")
    return {row["bytes"]: row["time_us"] for row in results}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", default=os.path.join(HERE, "..", "target", "release", "trainer"))
    parser.add_argument("--backends", default="shm,shm:ordinary,tcp")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=int, default=300, help="milliseconds for each size in each round")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    backends = options.backends.split(",")
    sizes = [int(size) for size in options.sizes.split(",")]
    for world in options.worlds.split(","):
        commands = {"gloo": [sys.executable, f"{HERE}/peers/allreduce_gloo.py", world, options.sizes, str(options.ms)]}
        for name in backends:
            backend, _, memory = name.partition(":")
            # mpirun starts the ranks of the backend mpi.
            start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", world] if backend == "mpi" else []
            flags = ["--backend", backend, "--memory", memory or "shared", "--sizes", options.sizes]
            flags += ["--ms", str(options.ms), "--json"]
            count = [] if backend == "mpi" else ["--cpus", world]
            commands[name] = [*start, options.trainer, "bench", "allreduce", *count, *flags]
        measured = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                measured[name].append(times(command))
        median = {
            name: {size: statistics.median(round[size] for round in rounds) for size in sizes}
            for name, rounds in measured.items()
        }
        heads = ["bytes", *(f"{name} us" for name in commands), *(f"{name}/gloo" for name in backends)]
        print(f"{world} ranks, f32 sum, medians of {options.rounds} rounds; x/gloo: how many times faster\n")
        if options.markdown:
            print(f"| {' | '.join(heads)} |\n|{' ---: |' * len(heads)}")
        else:
            print(" ".join(f"{head:>12}" for head in heads))
        for size in sizes:
            row = [f"{size:,}", *(f"{median[name][size]:,.2f}" for name in commands)]
            row += [f"{median['gloo'][size] / median[name][size]:.1f}" for name in backends]
            print(f"| {' | '.join(row)} |" if options.markdown else " ".join(f"{cell:>12}" for cell in row))
        print(flush=True)


if __name__ == "__main__":
    main()
