"""Keeps the results of first_light.sh, one JSON object per line, and prints their table.

    results.py begin FILE [AGAIN…]      locks descriptor 9, marks steps to be repeated, prints "STEP ATTEMPTS STATE" of each step
    results.py gpus FILE DOCTOR         checks the JSON of `trainer doctor`, prints the number of GPUs
    results.py end FILE STEP GROUP KIND CODE SECONDS LIMIT LOG OFFSET WORK      prints the state, or nothing if the step runs again
    results.py skip FILE STEP GROUP REASON
    results.py table FILE               reads "GROUP STEP KIND" lines, prints the table

States: started, passed, failed, timeout, stopped (by a signal), skipped, again. A step that has started and has no other state was
killed together with the script: that counts as a timeout. Two timeouts are a result. first_light.sh itself writes `started`.

Kinds say where the figures of a step are. LOG has its output from OFFSET on.
    run                        the last line of the output
    machine, doctor            the output
    train[:cold|warm[:TOP1]]   the run folder in WORK/run; the last top-1 must be at least TOP1
    repeat:STEP                the same; the losses must be those of STEP, to the bit
    time:NETWORK:BATCH:COLUMN  WORK/step.json of `benches/step`, or the output of peers/step.py (COLUMN is pytorch)
"""

import fcntl
import hashlib
import json
import os
import pathlib
import sys

from table import table

TIMEOUT, KILLED = 124, 137


class Wrong(ValueError):
    """A wrong result that has figures."""

    def __init__(self, why, figures):
        super().__init__(why)
        self.figures = figures


def die(cause, hint):
    print(f"error: first_light.sh: {cause}\nhint: {hint}", file=sys.stderr)
    sys.exit(2)


def read(file):
    """Returns the lines of a results file. The last line may be torn, since the machine may have stopped while it was written."""
    try:
        lines = file.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        die(f"{file}: {error}", "name another folder, or remove the file")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                found.append(json.loads(line))
                found[-1]["step"], found[-1]["state"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                continue
            die(f"{file}:{number}: this is not a result of first_light.sh", "name another folder, or remove the file")
    return found


def write(file, **result):
    try:
        with file.open("a") as out:
            out.write(json.dumps(result) + "\n")
    except OSError as error:
        die(f"{file}: {error}", "free some space; the next call continues")


def last(found):
    """Returns each step's last result, with the number of its attempts."""
    steps = {}
    for result in found:
        step = steps.get(result["step"], {"attempts": 0})
        if result["state"] == "again":
            steps.pop(result["step"], None)
            continue
        counted = {"started": 1, "stopped": -1}.get(result["state"], 0)
        killed = result["state"] == "started" and {"state": "timeout", "note": "killed together with first_light.sh"}
        steps[result["step"]] = {**result, **(killed or {}), "attempts": step["attempts"] + counted}
    return steps


def is_result(result):
    return result["state"] in ("passed", "failed") or (result["state"] == "timeout" and result["attempts"] >= 2)


def begin(file, *again):
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        die(f"another first_light.sh uses {file.parent}", "wait for its end, or name another folder")
    steps = last(read(file))
    text = file.read_bytes()
    if not text.endswith(b"\n"):
        os.truncate(file, text.rfind(b"\n") + 1)
    for name in again:
        repeated = [step for step, result in steps.items() if result["state"] in ("failed", "timeout")]
        if name != "failed":
            repeated = [name]
        for step in repeated:
            if step not in steps:
                die(f"AGAIN={name}: there is no result of that name in {file}", f"there are: failed {' '.join(steps)}")
            write(file, step=step, state="again")
    for step, result in last(read(file)).items():
        print(step, result["attempts"], result["state"] if is_result(result) else "")
        if step == "doctor" and result["state"] == "passed":
            print("gpus", 0, len(result["figures"]["gpus"]))


def gpus(file, doctor):
    """Prints the number of GPUs, or nothing if the doctor failed."""
    try:
        report = json.loads(pathlib.Path(doctor).read_text())
        found, features = report["gpus"], report["features"]
    except (OSError, ValueError, KeyError):
        return
    if "cuda" not in features:
        build = "cargo build --release --features cuda -p trainer -p benches --bins --bench step"
        die("TRAINER was built without GPUs", f"build it with: {build}")
    if not found:
        why = report["driver"].get("missing", "the driver shows none") if isinstance(report["driver"], dict) else "no driver"
        die(f"this machine has no GPU: {report.get('visible') or why}", "`trainer doctor` shows what was looked for")
    print(len(found))


def skip(file, step, group, reason):
    known = last(read(file)).get(step, {})
    if (known.get("state"), known.get("note")) != ("skipped", reason):
        write(file, step=step, group=group, state="skipped", note=reason)


def end(file, step, group, kind, code, seconds, limit, log, offset, work):
    with open(log, "rb") as text:
        text.seek(int(offset))
        output = text.read().decode(errors="replace")
    code, seconds, limit = int(code), float(seconds), int(limit)
    result = {"step": step, "group": group, "code": code, "seconds": seconds, "limit": limit}
    attempts = last(read(file))[step]["attempts"]
    if kind == "stopped":
        result |= {"state": "stopped", "note": "stopped by a signal"}
    elif code == TIMEOUT or (code == KILLED and seconds >= limit):
        result |= {"state": "timeout", "note": f"not done in {limit} s"}
    elif code != 0:
        result |= {"state": "failed", "note": cause(output) or f"exit code {code}"}
    else:
        try:
            note, figures = figures_of(kind, output, pathlib.Path(work), last(read(file)))
            result |= {"state": "passed", "note": note, "figures": figures}
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            result |= {"state": "failed", "note": str(error) or repr(error), "figures": getattr(error, "figures", None)}
    write(file, **result)
    if is_result({**result, "attempts": attempts}):
        print(result["state"])


def cause(output):
    """Returns the line that says why a program failed: the first of our messages, or the last line of PyTorch's traceback and of
    compute-sanitizer's summary."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if line.lower().startswith("error") or "WRONG" in line or "ERROR SUMMARY" in line]
    return (said or lines[-1:] or [""])[0][:300]


def figures_of(kind, output, work, steps):
    """Returns a line for the table, and numbers. Raises ValueError if the step's result is wrong."""
    kind, *words = kind.split(":")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if kind == "machine":
        facts = [line for line in lines if "release" in line or "Driver Version" in line]
        missing = [name for name in ("nvidia-smi", "nvcc") if any(f"{name}: " in line and "not found" in line for line in lines)]
        note = facts[-1].strip(" |") if facts else ""
        return "; ".join(part for part in (note, f"no {', no '.join(missing)}" if missing else "") if part), None
    if kind == "doctor":
        return doctor(json.loads(output[output.index("{") :]))
    if kind in ("train", "repeat"):
        return training(words if kind == "train" else [], words[0] if kind == "repeat" else None, work, steps)
    if kind == "time":
        network, batch, column = words
        if column == "pytorch":
            (times,) = json.loads(lines[-1]).values()
        else:
            row, *launched = json.loads((work / "step.json").read_text())
            times = {**row["ours"], **{key: row[key] for key in ("first_step_s", "peak_bytes", "device")}}
            if launched:
                times["launched_step"] = launched[0]["ours"]["step"]
        times = {"network": network, "batch": int(batch), "column": column, **times}
        return f"{times['step']:.2f} ms a step, the first {times['first_step_s']:.1f} s", times
    return lines[-1] if lines else "", None


def doctor(report):
    gpu = report["gpus"][0]
    figures = {
        "gpus": [gpu["name"] for gpu in report["gpus"]],
        "compute": ".".join(map(str, gpu["compute"])),
        "cuda": report["driver"].get("cuda"),
        "driver": report["driver"].get("version"),
        "nvrtc": report["nvrtc"].get("version"),
    }
    wrong = [f"memory of GPU {gpu['index']}: {gpu['memory_check']}" for gpu in report["gpus"] if gpu["memory_check"] != "works"]
    wrong += [report["versions"]] if report["versions"] else []
    wrong += [f"compiler: {report['compiler']}"] if report["compiler"] != "works" else []
    if wrong or report["would_use"]["device"].startswith("CPU,"):
        raise ValueError("; ".join(wrong) or report["would_use"]["why"])
    return f"ipc: {report['ipc']}; {report['would_use']['gradients']}", figures


def training(words, repeated, work, steps):
    """Returns the figures of the only run in WORK/run."""
    (summary,) = (work / "run").glob("*/summary.json")
    found = json.loads(summary.read_text())
    lines = (summary.parent / "metrics.jsonl").read_text().splitlines()
    # The digits of a loss in JSON are those of its bits.
    losses = [json.dumps(loss) for loss in (json.loads(line).get("loss") for line in lines) if loss is not None]
    top1 = (found.get("last") or {}).get("top1")
    figures = {
        "seconds": found["seconds"],
        "images_per_s": found["images_per_s"],
        "top1": top1,
        "steps": found["steps"],
        "losses": hashlib.sha256(" ".join(losses).encode()).hexdigest(),
    }
    note = f"{found['seconds']:.1f} s, {found['images_per_s']:.0f} images/s"
    if top1 is not None:
        note = f"{top1:.2f} %, {note}"
    if len(words) > 1 and (top1 is None or top1 < float(words[1])):
        raise Wrong(f"the last top-1 is below {words[1]} %: {note}", figures)
    if repeated:
        other = (steps.get(repeated) or {}).get("figures") or {}
        if "losses" not in other:
            raise ValueError(f"{repeated} has no losses to compare with")
        if other["losses"] != figures["losses"]:
            raise Wrong(f"the losses are not those of {repeated}: {note}", figures)
        note = f"losses as in {repeated}; {note}"
    elif words and words[0] == "cold":
        note = f"cold; {note}"
    return note, figures


def main():
    commands = {"begin": begin, "gpus": gpus, "end": end, "skip": skip}
    command, file, *words = sys.argv[1:]
    if command == "table":
        print(table(last(read(pathlib.Path(file))), sys.stdin.read().split("\n")))
    else:
        commands[command](pathlib.Path(file), *words)


if __name__ == "__main__":
    main()
