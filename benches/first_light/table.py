"""The table of first_light.sh: at most 80 columns and 40 lines."""

COLUMNS, LINES = 80, 40
WORDS = {"passed": "passed", "failed": "FAILED", "timeout": "TIMEOUT", "skipped": "skipped", "stopped": "stopped"}


def cut(text, width):
    """Returns one printable line of at most `width` characters."""
    text = "".join(c if c.isprintable() else " " for c in text).rstrip()
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def row(step, result):
    if result is None:
        return f"{cut(step, 20):<20} -"
    seconds = f"{result['seconds']:.0f}" if "seconds" in result else ""
    word = WORDS[result["state"]]
    note = result.get("note", "")
    if result["attempts"] > 1:
        note = f"attempt {result['attempts']}: {note}"
    return f"{cut(step, 20):<20} {word:<7} {seconds:>5}  {note}"


def times(steps, plan):
    """Returns the lines of the step times, one per network and batch."""
    cells = {}
    for _, step, kind in plan:
        if kind.startswith("time:"):
            _, network, batch, column = kind.split(":")
            cells.setdefault((network, batch), {})[column] = steps.get(step)
    if not cells:
        return []
    lines = [f"{'ms a step':<17} {'batch':>5} {'f32':>7} {'bf16':>7} {'PyTorch':>7} {'ratio':>6} {'GiB':>9} {'first step':>10}"]
    for (network, batch), found in cells.items():
        figures = {column: result["figures"] for column, result in found.items() if result and result["state"] == "passed"}
        cell = {column: time_of(found.get(column)) for column in ("f32", "bf16", "pytorch")}
        ours, peer = figures.get("bf16"), figures.get("pytorch")
        ratio = f"{peer['step'] / ours['step']:.2f}" if ours and peer else "-"
        pair = lambda key, scale, digits: "/".join(
            f"{each[key] / scale:.{digits}f}" if each and each.get(key) else "-" for each in (ours, peer)
        )
        lines.append(
            f"{cut(network, 17):<17} {batch:>5} {cell['f32']:>7} {cell['bf16']:>7} {cell['pytorch']:>7} {ratio:>6}"
            f" {pair('peak_bytes', 2**30, 1):>9} {pair('first_step_s', 1, 0):>10}"
        )
    return lines


def time_of(result):
    if result is None:
        return "-"
    return f"{result['figures']['step']:.2f}" if result["state"] == "passed" else WORDS[result["state"]]


def table(steps, plan):
    """Returns the table of the steps of the plan, lines of "GROUP STEP KIND"."""
    plan = [line.split(" ") for line in plan if line]
    facts = (steps.get("doctor") or {}).get("figures")
    head = "first light"
    if facts:
        many = f"{len(facts['gpus'])} x " if len(facts["gpus"]) > 1 else ""
        head += f": {many}{facts['gpus'][0]} ({facts['compute']}), driver {facts['driver'] or '?'} for CUDA {facts['cuda']}"
        head += f", NVRTC {facts['nvrtc'] or '?'}"
    states = [steps[step]["state"] if step in steps else "" for _, step, _ in plan]
    number = lambda *names: sum(state in names for state in states)
    gave_up = sum(steps[step]["state"] == "timeout" and steps[step]["attempts"] >= 2 for _, step, _ in plan if step in steps)
    bad, skipped = number("failed") + gave_up, number("skipped")
    left = len(plan) - number("passed") - bad - skipped
    foot = [f"{number('passed')} passed, {bad} failed, {skipped} skipped, {left} left"]
    if left:
        foot[0] += ": call again with the same OUT"
    elif any(kind.startswith("time:") for _, _, kind in plan):
        foot += ["PyTorch: bf16; ratio: PyTorch / ours in bf16; GiB, seconds of the first step:",
            "ours in bf16 / PyTorch's"]
    lines, after = [], []
    for group, step, kind in plan:
        result = steps.get(step)
        # A time that was measured has its cell, and no line.
        if kind.startswith("time:") and (result is None or result["state"] in ("passed", "skipped")):
            continue
        lines.append((group, result["state"] if result else "", row(step, result)))
    # Print a reason that all networks share once.
    timings = [step for _, step, kind in plan if kind.startswith("time:")]
    reasons = {steps[step]["note"] for step in timings if steps.get(step, {}).get("state") == "skipped"}
    after = [f"PyTorch was skipped: {reason}" for reason in sorted(reasons)]
    timed = times(steps, plan)
    if len(timed) > 26:
        timed = timed[:25] + [f"and {len(timed) - 25} more rows: results.jsonl"]
    room = LINES - len(timed) - len(after) - len(foot) - 2
    texts = [text for _, _, text in fit(lines, room)]
    whole = [head, f"{'step':<20} {'result':<7} {'s':>5}  note", *texts, *timed, *after, *foot]
    return "\n".join(cut(line, COLUMNS) for line in whole)


def fit(lines, room):
    """Returns at most `room` lines. Steps that passed are folded group by group, the last group first."""
    groups = list(dict.fromkeys(group for group, _, _ in lines))
    for group in reversed(groups):
        passed = [line for line in lines if line[0] == group and line[1] == "passed"]
        if len(lines) <= room or len(passed) < 2:
            continue
        place = lines.index(passed[0])
        names = ", ".join(text.split()[0] for _, _, text in passed)
        kept = [line for line in lines if line not in passed]
        lines = kept[:place] + [(group, "folded", f"{group}: {len(passed)} passed: {names}")] + kept[place:]
    if len(lines) > room:
        more = len(lines) - room + 1
        lines = lines[: room - 1] + [("", "", f"and {more} more steps: results.jsonl")]
    return lines
