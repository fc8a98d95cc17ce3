#!/usr/bin/env python3
"""Trains several configurations at the same time on one GPU, in a given time: for a GPU that is rented by the hour.

usage: rows_in.py SECONDS OUT CONFIG.toml[:KEY=VALUE,…] …

If SECONDS are too few for the epochs of the files, all runs are shortened by the same factor, so that the last one ends in time,
with its whole schedule. For this, all configurations first train together for PROBE seconds, from the moment when each has compiled
its kernels and taken some steps, and then each alone for a quarter of that, while the others are stopped (SIGSTOP). Then each is
trained from the start. KEY=VALUE are settings of one configuration, e.g.
configs/cifar_vgg16.toml:train.batch_size=128,train.epochs=40; lists belong into the file, as they contain commas.
Small networks do not fill a large GPU: if nvidia-cuda-mps-control is found, the runs share the GPU through NVIDIA's MPS, otherwise
they take turns.
Variables: TRAINER, the program (default target/release/trainer); DATA, the data folder; FLAGS, flags of every run (default
"--gpus 1"); PROBE, seconds (default 20); RESERVE, the share of the rest that is kept free (default 0.1).
OUT gets runs/, logs/ and results/CONFIG/ (small forms of the runs, to be committed). SIGTERM and Ctrl-C save checkpoints and end.
The exit code is 1 if a run fails, 2 for bad input. Needs Python 3.9.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Steps after which a run has compiled all kernels.
FIRST_STEPS = 20
# The fewest steps by which the speed of a run is measured.
MEASURED_STEPS = 5
# What a run needs besides its epochs: starting, the last evaluation and saving.
START_SECONDS = 10


def die(cause, hint):
    print(f"error: rows_in.py: {cause}\nhint: {hint}", file=sys.stderr)
    sys.exit(2)


class Row:
    """A configuration and its runs."""

    def __init__(self, argument, out, options):
        path, _, settings = argument.partition(":")
        self.config, self.name, self.out, self.options = Path(path), Path(path).stem, out, options
        if not self.config.is_file():
            die(f"{path} is not a file", "name TOML files, e.g. configs/cifar_resnet18.toml")
        self.settings = [setting for setting in settings.split(",") if setting]
        self.process = None

    def start(self, kind, settings):
        """Starts a run. `kind` is `probe` or the folder of all runs, `runs`."""
        self.folder, self.log = self.out / kind / self.name, self.out / "logs" / f"{self.name}-{kind}.log"
        flags = [flag for setting in self.settings + settings for flag in ("--set", setting)]
        command = [self.options.trainer, "--config", self.config, "--run-dir", self.folder, *self.options.flags, *flags]
        # In a session of its own: Ctrl-C would reach it besides the SIGTERM of `stop`, and a second signal may end it at once.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True
        )

    def stop(self):
        """Ends a run that goes on, with a checkpoint."""
        if self.process and self.running():
            self.process.terminate()
            self.signal(signal.SIGCONT)
            self.process.wait()

    def run(self):
        return max(self.folder.glob("*/"), default=None)

    def failed(self, *stopped):
        """Waits for the run. Returns whether it failed, after its last lines. `stopped` are exit codes after a signal of ours."""
        if (code := self.process.wait()) not in (0, *stopped):
            print(f"{self.name} failed with exit code {code}, {self.log} ends with:")
            print("\n".join(self.log.read_text().splitlines()[-5:]))
            return True
        return False

    def steps(self):
        """Returns what the run wrote about each step so far."""
        try:
            text = (self.run() / "metrics.jsonl").read_text()
        except (OSError, TypeError):  # no file or no folder yet
            return []
        # The last line may not be complete yet.
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def signal(self, number):
        """Sends a signal to the processes of a run that goes on."""
        if self.running():
            os.killpg(self.process.pid, number)

    def running(self):
        return self.process.poll() is None

    def rate(self, first, last):
        """Returns the median of the images per second of these steps, or None."""
        rates = [step["images_per_s"] for step in self.steps()[first:last] if step["images_per_s"]]
        return statistics.median(rates) if rates else None

    def measure(self, beside, alone):
        """Reads the configured epochs, and the seconds of one beside the others and alone, with its share of evaluations, from the
        images per second."""
        data = json.loads((self.run() / "summary.json").read_text())["data"]
        train, test = (int(count.replace(",", "")) for count in re.search(r"([\d,]+) \+ ([\d,]+) images", data).groups())
        config = (self.run() / "config.toml").read_text()
        self.epochs, every = (int(re.search(rf"^{key} = (\d+)", config, re.MULTILINE)[1]) for key in ("epochs", "eval_every"))
        # An image of an evaluation takes a third of an image of a training step: there is no backward pass.
        images = train + test / 3 / every
        # What runs do together is not always more: a run alone is at least as fast as beside others.
        self.beside, self.alone = images / beside, images / max(alone, beside)


def number(name, text, lowest, highest, example):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not lowest <= value <= highest:
        die(f"{name}={text} is not a number from {lowest:g} to {highest:g}", f"e.g. {example}")
    return value


class Options:
    """The command line and the variables."""

    def __init__(self, arguments):
        if len(arguments) < 3 or arguments[0].startswith("-"):
            print(__doc__, file=sys.stderr)
            sys.exit(2)
        self.probe = number("PROBE", os.environ.get("PROBE", "20"), 1, 3600, "PROBE=20")
        self.reserve = number("RESERVE", os.environ.get("RESERVE", "0.1"), 0, 0.9, "RESERVE=0.1")
        self.seconds = number("SECONDS", arguments[0], 3 * self.probe, 1e7, "600; the probe takes at most a third of it")
        self.out, self.configs = Path(arguments[1]).resolve(), arguments[2:]
        self.trainer = os.environ.get("TRAINER", "target/release/trainer")
        self.flags = shlex.split(os.environ.get("FLAGS", "--gpus 1"))
        if data := os.environ.get("DATA"):
            self.flags += ["--data-dir", data]
        if not shutil.which(self.trainer):
            die(f"{self.trainer} is not a program", "cargo build --release --features cuda, or set TRAINER")


def share_gpu(out):
    """Starts MPS if there is one. Returns whether it runs."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not control:
        print("note: nvidia-cuda-mps-control is missing; the runs take turns on the GPU")
        return False
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = str(out / "mps")
    (out / "mps").mkdir(exist_ok=True)
    return subprocess.run([control, "-d"]).returncode == 0


def last_end(runs, factor):
    """Returns the second in which the last run ends if all are shortened to `factor`.

    `runs` have epochs, and the seconds of an epoch alone and beside the others. Together, the runs do `sum(alone / beside)` times
    as much as one after the other. Each run gets its own part of that, since networks with small kernels get less than others. When
    a run ends, the others share its part in proportion to theirs, and what they gain together goes down to nothing for the last one.
    """
    left = {index: max(1, int(epochs * factor)) * alone for index, (epochs, alone, _) in enumerate(runs)}
    shares = [alone / beside for _, alone, beside in runs]
    gain, end = max(1, sum(shares)), 0.0
    while left:
        together = 1 + (gain - 1) * (len(left) - 1) / max(1, len(runs) - 1)
        shared = sum(shares[index] for index in left)
        speeds = {index: min(1, shares[index] / shared * together) for index in left}
        first = min(left, key=lambda index: left[index] / speeds[index])
        step = left[first] / speeds[first]
        end += step
        left = {index: work - step * speeds[index] for index, work in left.items() if index != first}
    return end


def fit(runs, rest):
    """Returns the epochs of each run with which all end within `rest` seconds, or None if not even one epoch of each fits."""
    if last_end(runs, 1) <= rest:
        return [epochs for epochs, _, _ in runs]
    if last_end(runs, 0) > rest:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if last_end(runs, middle) <= rest else (low, middle)
    return [max(1, int(epochs * low)) for epochs, _, _ in runs]


def wait_for_steps(rows, steps, seconds, latest):
    """Waits for some seconds, and until each run that goes on has taken its number of `steps`. Returns early if a run fails."""
    end = time.monotonic() + seconds
    while all(row.process.poll() in (None, 0) for row in rows):
        running = [(row, wanted) for row, wanted in zip(rows, steps) if row.running()]
        now = time.monotonic()
        if not running or now > latest or (now > end and all(len(row.steps()) >= wanted for row, wanted in running)):
            break
        time.sleep(0.1)


def alone(rows, row, seconds, latest):
    """Returns the images per second of a run while the others are stopped, or None if it takes no step then."""
    others = [other for other in rows if other is not row]
    for other in others:
        other.signal(signal.SIGSTOP)
    try:
        # What the run writes first began beside the others. It may be several steps at once.
        wait_for_steps([row], [len(row.steps()) + 1], 0, latest)
        first = len(row.steps())
        wait_for_steps([row], [first + MEASURED_STEPS], seconds, latest)
        return row.rate(first, None)
    finally:
        for other in others:
            other.signal(signal.SIGCONT)


def probe(options, rows):
    """Trains all configurations together, and then each alone, until the speed of each is known. Returns whether one failed."""
    for row in rows:
        row.start("probe", ["checkpoint.every=0"])
    latest = time.monotonic() + options.seconds / 2
    while all(row.process.poll() in (None, 0) for row in rows):
        slow = [row.name for row in rows if row.running() and len(row.steps()) < FIRST_STEPS]
        if not slow:
            break
        if time.monotonic() > latest:
            die(f"{slow[0]} took no {FIRST_STEPS} steps in {options.seconds / 2:g} s", "more SECONDS: it compiles kernels first")
        time.sleep(0.2)
    # From here on no run compiles.
    first = [len(row.steps()) for row in rows]
    # A slow run may take no step in this time: each must have taken some.
    wait_for_steps(rows, [start + MEASURED_STEPS for start in first], options.probe, latest)
    last = [len(row.steps()) for row in rows]
    rates = [alone(rows, row, options.probe / 4, latest) if len(rows) > 1 else None for row in rows]
    for row in rows:
        row.stop()
    if any([row.failed(128 + signal.SIGTERM, -signal.SIGTERM) for row in rows]):
        return True
    for row, start, end, rate in zip(rows, first, last, rates):
        # A run that has ended may have taken no step since: it is measured by all of them.
        beside = row.rate(start, end) or row.rate(0, None)
        if not beside:
            die(f"{row.name} took no step in the probe", "a longer PROBE")
        row.measure(beside, rate or beside)
    return False


def as_they_end(runs):
    """Yields each run, with its epochs, when it has ended."""
    while runs:
        for run in [run for run in runs if not run[0].running()]:
            runs.remove(run)
            yield run
        time.sleep(0.1)


def train(options, rows, begun):
    """Probes and trains. Returns the number of runs that failed."""
    if probe(options, rows):
        return len(rows)
    rest = (options.seconds - (time.monotonic() - begun)) * (1 - options.reserve) - START_SECONDS
    epochs = fit([(row.epochs, row.alone, row.beside) for row in rows], rest)
    if not epochs:
        die(f"one epoch of each configuration does not fit in {rest:.0f} s", "more SECONDS, or fewer configurations")
    for row, count in zip(rows, epochs):
        seconds = f"{row.beside:.2f} s each beside the others, {row.alone:.2f} s alone"
        print(f"{row.name}: {count} of {row.epochs} epochs, {seconds}", flush=True)
        row.start("runs", [f"train.epochs={count}"])
    failed = 0
    for row, count in as_they_end(list(zip(rows, epochs))):
        if row.failed():
            failed += 1
            continue
        # A folder for each configuration: two runs of one network that start in the same second have the same name.
        save = [options.trainer, "table", row.run(), "--save", options.out / "results" / row.name]
        saved = subprocess.run(save, stdout=subprocess.DEVNULL)
        best = json.loads((row.run() / "summary.json").read_text())["best"]["top1"]
        print(f"{row.name}: {best:.2f} % in {count} epochs, {time.monotonic() - begun:.0f} s after the start", flush=True)
        failed += saved.returncode != 0
    return failed


def main():
    begun, options = time.monotonic(), Options(sys.argv[1:])
    try:
        for folder in ("probe", "runs", "logs", "results"):
            (options.out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        die(f"{options.out}: {error.strerror}", "name a folder of your own")
    rows = [Row(argument, options.out, options) for argument in options.configs]
    if len({row.name for row in rows}) < len(rows):
        die("two configurations have the same name", "copy one to a file with another name")
    if any((options.out / "runs" / row.name).exists() for row in rows):
        die(f"{options.out} has runs of these configurations", "name another folder")

    def stop(number, _):
        # The runs have only this signal to end by: no other one interrupts the end.
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    shares = share_gpu(options.out)
    try:
        failed = train(options, rows, begun)
    finally:
        for row in rows:
            row.stop()
        if shares:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
