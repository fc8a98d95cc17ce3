#!/usr/bin/env python3
"""Disturbs training runs at random and checks what must hold: python3 benches/chaos SECONDS [--seed N] [--only NAME,…]

Kills, stops, signals, closed terminals, two programs on one run, outages of the network, damaged files, full disks. Each round
is one disturbed run, which must end as documented, leave no process behind and continue to the bits of an undisturbed run.
The exit code is 1 if something did not hold. `--seed` repeats the choices of a run; the machine's timing cannot be repeated.
docs/reliability.md describes the scenarios. Needs Linux and Python 3.9. Root may also fill a disk and cut a network.
"""

import argparse
import collections
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import damage
import faults
import nodes
from program import Failed, Round, Skipped, result

SCENARIOS = {scenario.__name__: scenario for module in (faults, damage, nodes) for scenario in module.SCENARIOS}


class References:
    """Undisturbed runs, one per mode, made when they are first needed."""

    def __init__(self, root, program):
        self.root, self.program, self.runs, self.results = root, program, {}, {}

    def folder(self, mode):
        if mode not in self.runs:
            round = Round(self.root / f"reference-{mode}", self.program, None, self)
            try:
                if mode == "nodes":
                    self.runs[mode] = nodes.undisturbed(round)
                else:
                    round.start(mode).wait(0)
                    self.runs[mode] = round.run_folder()
            finally:
                round.clean()
            self.results[mode] = result(self.runs[mode])
        return self.runs[mode]

    def __call__(self, mode):
        self.folder(mode)
        return self.results[mode]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float, help="no round starts after this time")
    parser.add_argument("--seed", type=int, help="repeat the choices of this seed (default: a new one)")
    parser.add_argument("--only", help=f"scenarios, separated by commas: {', '.join(SCENARIOS)}")
    parser.add_argument("--program", type=Path, default=Path("target/release/trainer"))
    parsed = parser.parse_args()
    parsed.only = parsed.only.split(",") if parsed.only else list(SCENARIOS)
    if unknown := [name for name in parsed.only if name not in SCENARIOS]:
        parser.error(f"no scenario is called {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if not parsed.program.is_file():
        parser.error(f"{parsed.program}: no such file; build it with `cargo build --release`, or name it with --program")
    return parsed


def order(names, seed):
    """Yields scenarios for ever: all in random order, then all again. Also yields the number of the scenario's round."""
    shuffle, count = random.Random(seed), 0
    while True:
        count += 1
        for name in shuffle.sample(names, len(names)):
            yield name, count


def main():
    asked = arguments()
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    root = Path(tempfile.mkdtemp(prefix="trainer-chaos-"))
    print(f"seed {seed}, folder {root}", flush=True)
    references = References(root, asked.program.resolve())
    counts = {name: collections.Counter() for name in SCENARIOS if name in asked.only}
    failures = []
    # As Ctrl-C does, a SIGTERM ends the processes of the round first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end = time.monotonic() + asked.seconds
    for name, count in order(list(counts), seed):
        if time.monotonic() > end:
            break
        # The choices depend on the seed, the scenario and its round alone, so `--only` repeats them.
        round = Round(root / f"{name}-{count}", references.program, random.Random(f"{seed} {name} {count}"), references)
        start, kept = time.monotonic(), False
        try:
            SCENARIOS[name](round)
            round.check_no_survivors()
            outcome, text = "held", ""
        except Skipped as cause:
            outcome, text = "skipped", f": {cause}"
        except Failed as cause:
            outcome, text, kept = "failed", f": {cause} (see {round.folder})", True
        finally:
            round.clean()
        counts[name][outcome] += 1
        line = f"{name} {count}: {outcome}{text}  [{'; '.join(round.notes)}]"
        print(f"{time.monotonic() - start:5.1f} s  {line}", flush=True)
        if kept:
            failures.append(line)
        else:
            shutil.rmtree(round.folder)
    report(counts, failures, seed)
    if not failures:
        shutil.rmtree(root)
    return 1 if failures else 0


def report(counts, failures, seed):
    print(f"\n{'scenario':<18}{'rounds':>8}{'held':>8}{'failed':>8}{'skipped':>8}")
    total = sum(counts.values(), collections.Counter())
    for name, one in [*counts.items(), ("all", total)]:
        print(f"{name:<18}{sum(one.values()):>8}" + "".join(f"{one[outcome]:>8}" for outcome in ("held", "failed", "skipped")))
    for line in failures:
        print(f"did not hold: {line}")
    if failures:
        names = sorted({line.split()[0] for line in failures})
        print(f"repeat with: python3 benches/chaos 600 --seed {seed} --only {','.join(names)}")


if __name__ == "__main__":
    sys.exit(main())
