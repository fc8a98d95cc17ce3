#!/usr/bin/env python3
"""Trains several configurations at the same time on one GPU, as many epochs as fit in a time: for a GPU that is rented by the hour.

usage: rows_in.py SECONDS OUT CONFIG.toml[:KEY=VALUE,…] …

First all configurations train together for PROBE seconds, which compiles their kernels and shows how fast each one is beside the
others. Then each is trained from the start with the epochs that fit in the rest of SECONDS, so that all end at about the same time
with their whole schedule. The epochs of the files are not used. KEY=VALUE are settings of one configuration, e.g.
configs/cifar_vgg16.toml:train.batch_size=128,optimizer.lr=0.1; lists belong into the file, as they contain commas.
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

    def failed(self):
        """Waits for the run. Returns whether it failed, after its last lines."""
        if code := self.process.wait():
            print(f"{self.name} failed with exit code {code}, {self.log} ends with:")
            print("\n".join(self.log.read_text().splitlines()[-5:]))
        return code != 0

    def epoch_seconds(self):
        """Returns the seconds of an epoch and its share of evaluations, from the second half of the probe's steps."""
        lines = [json.loads(line) for line in (self.run() / "metrics.jsonl").read_text().splitlines()]
        if len(lines) < 20:
            die(f"{self.name} took {len(lines)} steps in the probe", "a longer PROBE: it compiles kernels first")
        rates = [line["images_per_s"] for line in lines[len(lines) // 2 :] if line["images_per_s"]]
        data = json.loads((self.run() / "summary.json").read_text())["data"]
        train, test = (int(count.replace(",", "")) for count in re.search(r"([\d,]+) \+ ([\d,]+) images", data).groups())
        every = int(re.search(r"^eval_every = (\d+)", (self.run() / "config.toml").read_text(), re.MULTILINE)[1])
        # An image of an evaluation takes a third of an image of a training step: there is no backward pass.
        return (train + test / 3 / every) / statistics.median(rates)


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


def train(options, rows, begun):
    """Probes and trains. Returns the number of runs that failed."""
    for row in rows:
        row.start("probe", [f"train.max_time_s={math.ceil(options.probe)}", "checkpoint.every=0"])
    if any([row.failed() for row in rows]):
        return len(rows)
    # What a run needs besides its epochs: starting, the last evaluation and saving.
    start_s = max(0.0, time.monotonic() - begun - options.probe)
    rest = (options.seconds - (time.monotonic() - begun)) * (1 - options.reserve) - start_s
    epochs = []
    for row in rows:
        seconds = row.epoch_seconds()
        epochs.append(int(rest / seconds))
        print(f"{row.name}: an epoch takes {seconds:.2f} s beside the others; {epochs[-1]} epochs", flush=True)
        if epochs[-1] < 1:
            die(f"no epoch of {row.name} fits in {rest:.0f} s", "more SECONDS, or fewer configurations")
    for row, count in zip(rows, epochs):
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
        failed = train(options, rows, begun)
    finally:
        for row in rows:
            row.stop()
        if shares:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
