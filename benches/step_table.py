#!/usr/bin/env python3
"""Makes one table of training steps, ours and PyTorch's, for every model, batch and precision.

    python benches/step_table.py LOGS --step PROGRAM [--python PYTHON] [--device cuda|cpu] [--budget SECONDS]
                                 [--models NAME,…] [--batches 128,512] [--precisions f32,bf16] [--rounds N] [--steps N]
                                 [--fused PROGRAM] [--capture]

Each measurement is a separate process, with its result in LOGS/<what>.json and its messages in LOGS/<what>.log. Existing
results are not measured again. A call ends within --budget, and the next call continues. The table of the results so far is
printed every time, and written to LOGS/table.md. A round covers all models, ours and PyTorch's in turn; the table has
medians over the rounds.

PROGRAM is `benches/step`, built by `cargo bench -p benches --bench step --no-run [--features cuda]`, which prints its path.
PYTHON must have torch (default: the Python that runs this). Ours: data on the device, augmented there, forward, backward, SGD with
Nesterov momentum. PyTorch: the same network without augmentation, images on the device, channels_last, `eager` and
`compiled` (torch.compile); bf16 is autocast; f32 may use TF32 on a GPU, as ours does. Memory is the peak of each allocator.
--fused adds a column for a PROGRAM that was built with --features fusion, --capture one for forward and backward alone, launch
by launch and then replayed as a recorded graph (one round).
The networks and sizes are those of models/tests/reference/networks.py.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=pathlib.Path)
    parser.add_argument("--step", type=pathlib.Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--fused", type=pathlib.Path)
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget", type=float, default=540, help="seconds of this call")
    parser.add_argument("--one", type=float, default=240, help="seconds that one measurement may take")
    parser.add_argument("--models", default="all")
    parser.add_argument("--batches", default="128,512")
    parser.add_argument("--precisions", default="f32,bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="PyTorch's on the CPU")
    parser.add_argument("--preload", help="a library for PROGRAM alone (LD_PRELOAD)")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what there is")
    return parser.parse_args()


def models(options):
    """Returns the names of the models in the order of networks.py."""
    names = subprocess.run(
        [options.python, "-B", "-c", "from networks import NETWORKS; print(*NETWORKS)"],
        cwd=HERE.parent / "models" / "tests" / "reference",
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    if options.models == "all":
        return names
    asked = options.models.split(",")
    unknown = [name for name in asked if name not in names]
    if unknown:
        sys.exit(f"--models {','.join(unknown)}: not among {', '.join(names)}")
    return asked


def variants(device, precision):
    """Returns PyTorch's variants by column of the table."""
    if device == "cpu":
        return {"eager": "nchw", "channels_last": "channels_last"} if precision == "f32" else {}
    return {"eager": precision, "compiled": f"{precision}_compiled"}


OURS = "ours", "fused", "captured"


def own_columns(options):
    """Returns the measurements of this project's programs."""
    return [column for column, asked in zip(OURS, (True, options.fused, options.capture)) if asked]


def jobs(options, names):
    """Returns name and command of every measurement."""
    for round_ in range(1, options.rounds + 1):
        for batch in map(int, options.batches.split(",")):
            for precision in options.precisions.split(","):
                for name in names:
                    case = f"{name}-{batch}-{precision}-{round_}"
                    programs = {"ours": [options.step], "fused": [options.fused], "captured": [options.step, "--capture"]}
                    for column in own_columns(options):
                        if column == "captured" and round_ > 1:
                            continue
                        result = options.logs / f"{case}-{column}.json.part"
                        ours = [*programs[column], "--device", options.device, "--precision", precision, "--batch", batch]
                        ours += ["--steps", options.steps, "--rounds", 1, "--json", result, name]
                        yield f"{case}-{column}", [str(word) for word in ours]
                    threads = 0 if options.device == "cuda" else options.threads
                    for column, variant in variants(options.device, precision).items():
                        peer = [options.python, "-B", HERE / "peers" / "step.py", name, batch, options.steps, threads, variant]
                        yield f"{case}-{column}", [str(word) for word in peer]


def measure(what, command, options, seconds):
    """Runs one measurement; writes a result, or the reason why there is none. A measurement that the budget ends has no
    result: the next call tries again."""
    result, log = options.logs / f"{what}.json", options.logs / f"{what}.log"
    limit = min(seconds, options.one)
    part = pathlib.Path(f"{result}.part")
    environment = dict(os.environ)
    own = what.endswith(OURS)
    if options.preload and own:
        environment["LD_PRELOAD"] = options.preload
    with open(log, "w") as said:
        try:
            # In a new session, so that helper processes of torch.compile end with it.
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment, start_new_session=True
            )
        except OSError as error:
            sys.exit(f"{command[0]}: {error}")
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if limit == options.one:
                result.write_text(json.dumps({"error": f"not done in {limit:.0f} s"}))
            part.unlink(missing_ok=True)
            return
    if process.returncode != 0:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit code {process.returncode}"
        # The reason is at the start of our messages, and at the end of PyTorch's traceback.
        found = {"error": next((line for line in lines if line.startswith("Error")), last)[:300]}
    elif own:
        (row,) = json.loads(part.read_text())
        found = {**row["ours"], **{key: row[key] for key in ("first_step_s", "peak_bytes", "device", "captured")}}
    else:
        (found,) = json.loads(output).values()
    part.unlink(missing_ok=True)
    waiting = options.logs / f"{what}.json.new"
    waiting.write_text(json.dumps(found))
    waiting.replace(result)


def medians(options, case, column):
    """Returns the medians over the rounds of one cell, or the reason why there are none."""
    files = [options.logs / f"{case}-{round_}-{column}.json" for round_ in range(1, options.rounds + 1)]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    good = [one for one in found if "error" not in one]
    if not good:
        return found[0] if found else None
    cell = {"step": statistics.median(one["step"] for one in good), "rounds": len(good)}
    cell["captured"] = good[0].get("captured")
    # Only the first start has no cache.
    cell["first_step_s"] = good[0]["first_step_s"]
    peaks = [one["peak_bytes"] for one in good if one.get("peak_bytes")]
    cell["peak_bytes"] = max(peaks) if peaks else None
    return cell


def replayed(cell):
    """Returns forward and backward: launch by launch, and as a graph."""
    times = cell and cell["captured"]
    if not times:
        return "-"
    return f"{times['launched']:.2f} > " + (f"{times['replayed']:.2f}" if times["graph"] else "no graph")


def table(options, names):
    head = ["model", "batch", "precision", "ours ms", "images/s", "first step s"]
    columns = list(variants(options.device, "f32"))
    own = own_columns(options)[1:]
    head += [{"fused": "fused ms", "captured": "launched > replayed ms"}[column] for column in own]
    head += [f"{column} ms" for column in columns] + ["best / ours", "GiB ours", *(f"GiB {column}" for column in columns)]
    lines, notes = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)], []
    gib = lambda cell: f"{cell['peak_bytes'] / 2**30:.2f}" if cell and cell.get("peak_bytes") else "-"
    for batch in map(int, options.batches.split(",")):
        for precision in options.precisions.split(","):
            for name in names:
                case = f"{name}-{batch}-{precision}"
                ours = medians(options, case, "ours")
                peers = {column: medians(options, case, column) for column in columns}
                cells = {"ours": ours, **{column: medians(options, case, column) for column in own}, **peers}
                if not any(cells.values()):
                    continue
                notes += [f"- {case}-{column}: {cell['error']}" for column, cell in cells.items() if cell and "error" in cell]
                ok = {column: cell for column, cell in cells.items() if cell and "error" not in cell}
                time_of = lambda column: f"{ok[column]['step']:.2f}" if column in ok else "-"
                best = min((ok[column]["step"] for column in columns if column in ok), default=None)
                row = [name, str(batch), precision, time_of("ours")]
                row.append(f"{1000 * batch / ours['step']:.0f}" if "ours" in ok else "-")
                row.append(f"{ours['first_step_s']:.1f}" if "ours" in ok else "-")
                row += [time_of(column) if column == "fused" else replayed(ok.get(column)) for column in own]
                row += [time_of(column) for column in columns]
                row.append(f"{best / ours['step']:.2f}" if best and "ours" in ok else "-")
                row += [gib(ok.get("ours")), *(gib(ok.get(column)) for column in columns)]
                lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines + [""] + notes) + "\n"


def main():
    options = arguments()
    options.logs.mkdir(parents=True, exist_ok=True)
    names = models(options)
    end = time.monotonic() + options.budget
    todo = [] if options.table else [job for job in jobs(options, names) if not (options.logs / f"{job[0]}.json").exists()]
    left = len(todo)
    for what, command in todo:
        seconds = end - time.monotonic()
        # Do not start a measurement that this call cannot finish.
        if seconds < min(options.one, options.budget) / 4:
            break
        measure(what, command, options, seconds)
        left -= 1
    text = table(options, names)
    (options.logs / "table.md").write_text(text)
    print(text)
    if left and not options.table:
        print(f"{left} measurements are left: call again with the same arguments")


if __name__ == "__main__":
    main()
