#!/usr/bin/env python3
"""Trains several configurations at the same time on one GPU, in a given time: for a GPU that is rented by the hour.

usage: rows_in.py SECONDS OUT CONFIG.toml[:KEY=VALUE,…] …

If SECONDS are too few for the epochs of the files, all runs are shortened by the same factor, so that the last one ends in time,
with its whole schedule. For this, all configurations first train together for PROBE seconds, from the moment when each has compiled
its kernels and taken some steps. Then each is trained from the start. KEY=VALUE are settings of one configuration, e.g.
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
# Two to four runs through MPS did 1.29 to 1.37 times as much as one alone on an H200.
MPS_GAIN = 1.3


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
        if self.process and self.process.poll() is None:
            self.process.terminate()
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
        return [json.loads(line) for line in text.splitlines()]

    def measure(self, first):
        """Reads the configured epochs, and the seconds of one, with its share of evaluations, after the `first` steps."""
        rates = [step["images_per_s"] for step in self.steps()[first:] if step["images_per_s"]]
        if not rates:
            die(f"{self.name} took no step in the probe", "a longer PROBE")
        data = json.loads((self.run() / "summary.json").read_text())["data"]
        train, test = (int(count.replace(",", "")) for count in re.search(r"([\d,]+) \+ ([\d,]+) images", data).groups())
        config = (self.run() / "config.toml").read_text()
        self.epochs, every = (int(re.search(rf"^{key} = (\d+)", config, re.MULTILINE)[1]) for key in ("epochs", "eval_every"))
        # An image of an evaluation takes a third of an image of a training step: there is no backward pass.
        self.seconds = (train + test / 3 / every) / statistics.median(rates)


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


def last_end(runs, factor, gain):
    """Returns the second in which the last run ends if all are shortened to `factor`.

    `runs` are pairs of epochs and of seconds that an epoch takes while all runs go on. `gain` is how much more several runs do
    together than one alone. When a run ends, the others are taken to share its part of the GPU equally, until one is left.
    """
    works = sorted(max(1, int(epochs * factor)) * seconds for epochs, seconds in runs)
    end = done = 0.0
    for index, work in enumerate(works):
        left = len(works) - index
        faster = len(works) / left / (gain if left == 1 and len(works) > 1 else 1)
        end += (work - done) / faster
        done = work
    return end


def fit(runs, rest, gain):
    """Returns the epochs of each run with which all end within `rest` seconds, or None if not even one epoch of each fits."""
    if last_end(runs, 1, gain) <= rest:
        return [epochs for epochs, _ in runs]
    if last_end(runs, 0, gain) > rest:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if last_end(runs, middle, gain) <= rest else (low, middle)
    return [max(1, int(epochs * low)) for epochs, _ in runs]


def probe(options, rows):
    """Trains all configurations together until the speed of each is known. Returns whether one failed."""
    for row in rows:
        row.start("probe", ["checkpoint.every=0"])
    latest = time.monotonic() + options.seconds / 2
    while all(row.process.poll() in (None, 0) for row in rows):
        slow = [row.name for row in rows if row.process.poll() is None and len(row.steps()) < FIRST_STEPS]
        if not slow:
            break
        if time.monotonic() > latest:
            die(f"{slow[0]} took no {FIRST_STEPS} steps in {options.seconds / 2:g} s", "more SECONDS: it compiles kernels first")
        time.sleep(0.2)
    # From here on no run compiles.
    first = [len(row.steps()) for row in rows]
    end = time.monotonic() + options.probe
    while all(row.process.poll() in (None, 0) for row in rows):
        now = time.monotonic()
        # A slow run may take no step in this time.
        running = [(row, start) for row, start in zip(rows, first) if row.process.poll() is None]
        if now > latest or (now > end and all(len(row.steps()) >= start + MEASURED_STEPS for row, start in running)):
            break
        time.sleep(0.2)
    # A run that has ended is measured by all its steps: it may have taken none since.
    first = [0 if row.process.poll() is not None else start for row, start in zip(rows, first)]
    for row in rows:
        row.process.terminate()
    if any([row.failed(128 + signal.SIGTERM, -signal.SIGTERM) for row in rows]):
        return True
    for row, start in zip(rows, first):
        row.measure(start)
    return False


def train(options, rows, begun, gain):
    """Probes and trains. Returns the number of runs that failed."""
    if probe(options, rows):
        return len(rows)
    rest = (options.seconds - (time.monotonic() - begun)) * (1 - options.reserve) - START_SECONDS
    epochs = fit([(row.epochs, row.seconds) for row in rows], rest, gain)
    if not epochs:
        die(f"one epoch of each configuration does not fit in {rest:.0f} s", "more SECONDS, or fewer configurations")
    for row, count in zip(rows, epochs):
        print(f"{row.name}: {count} of {row.epochs} epochs, {row.seconds:.2f} s each beside the others", flush=True)
        row.start("runs", [f"train.epochs={count}"])
    failed = 0
    for row, count in zip(rows, epochs):
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
        failed = train(options, rows, begun, MPS_GAIN if shares else 1)
    finally:
        for row in rows:
            row.stop()
        if shares:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
