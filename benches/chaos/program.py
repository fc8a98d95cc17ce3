"""Starts the program, disturbs it, and compares what it leaves with an undisturbed run."""

import csv
import fcntl
import hashlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import termios
import time
from pathlib import Path

# Seconds until a process that should end counts as hanging. Only a hang reaches it, also on a busy machine.
HANG_TIMEOUT = 300
# The variable that marks all processes of a round. Children inherit it.
MARK = "TRAINER_CHAOS_ROUND"

CONFIG = """
[model]
name = "lenet"
[data]
name = "fashion-mini"
augment = ["crop", "flip"]
limit_train = 1024
limit_test = 200
[train]
epochs = 4
batch_size = 16
[optimizer]
lr = 0.02
[log]
tensorboard = false
"""
EPOCHS = 4
STEPS = 256

# The flags of each mode.
MODES = {"single": [], "ddp": ["--cpus", "2"], "dp": ["--mode", "dp", "--cpus", "2"]}


class Failed(Exception):
    """Something did not hold."""


class Skipped(Exception):
    """This machine cannot do what the scenario needs."""


class Program:
    """One started program."""

    def __init__(self, round, arguments, terminal=None, largest_file=None, prefix=(), **variables):
        """Starts the program. `terminal` becomes its controlling terminal, else its output goes to a file. `largest_file`: the
        bytes from which a file cannot grow. `prefix` starts the program, `variables` are added to its environment."""
        self.round, self.name = round, shlex.join(["trainer", *map(str, arguments)])
        count = sum(1 for _ in round.folder.glob("*.screen"))
        self.screen = round.folder / f"{count}.screen"
        self.screen.write_text(f"$ {self.name}\n")

        def prepare():
            # Shells start background jobs with SIGINT ignored, and children inherit that.
            for number in (signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            if terminal is not None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        with open(self.screen, "ab") as screen:
            self.process = subprocess.Popen(
                [*prefix, round.program, *map(str, arguments)],
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=screen if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                cwd=round.folder,
                env=round.environment() | variables,
                preexec_fn=prepare,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def text(self):
        return self.screen.read_text(errors="replace")

    def running(self):
        return self.process.poll() is None

    def send(self, number):
        if self.running():
            os.kill(self.pid, number)

    def wait(self, *codes, timeout=HANG_TIMEOUT):
        """Waits for the end, checks the exit code and what the screen says, and returns the code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise Failed(f"`{self.name}` did not end within {timeout} s") from None
        text = self.text()
        if "internal error" in text or "panicked" in text:
            raise Failed(f"`{self.name}` has an internal error")
        if codes and code not in codes:
            raise Failed(f"`{self.name}` ended with {code}, not with {' or '.join(map(str, codes))}")
        if code in (1, 2, 3) and not ("error:" in text and "hint:" in text):
            raise Failed(f"`{self.name}` ended with {code} without an error and a hint")
        return code


class Round:
    """One round of a scenario: a folder, random choices, and the processes that were started."""

    def __init__(self, folder, program, random, references):
        self.folder, self.program, self.random, self.references = folder, program, random, references
        self.notes, self.cleanups = [], []
        folder.mkdir(parents=True)
        (folder / "chaos.toml").write_text(CONFIG)

    def environment(self):
        # One thread per process, so that the bits do not depend on the machine's cores.
        return os.environ | {MARK: str(self.folder), "RAYON_NUM_THREADS": "1", "NO_COLOR": "1"}

    def note(self, text):
        """Notes a choice, for the report of a failure."""
        self.notes.append(text)

    def start(self, mode, *more, **options):
        """Starts a new run."""
        return Program(self, ["--config", "chaos.toml", *MODES[mode], *more], **options)

    def resume(self, run, mode, *more, **options):
        return Program(self, ["--resume", run, *MODES[mode], *more], **options)

    def run_folder(self, root="runs"):
        """Returns the only run folder; None if there is none yet."""
        found = [path for path in (self.folder / root).glob("*") if (path / "config.toml").exists()]
        if len(found) > 1:
            raise Failed(f"{len(found)} run folders for one run")
        return found[0] if found else None

    def wait_for_step(self, program, step, root="runs"):
        """Waits until the run has reported `step` steps, or the program has ended."""
        until = time.monotonic() + HANG_TIMEOUT
        while program.running():
            run = self.run_folder(root)
            if run and lines(run / "metrics.jsonl") >= step:
                return
            if time.monotonic() > until:
                raise Failed(f"step {step} was not reached within {HANG_TIMEOUT} s")
            time.sleep(0.005)

    def wait_for_random_moment(self, program, start=0.15):
        """Waits for a random moment of a run: sometimes while the program starts, else at a random step."""
        if self.random.random() < start:
            pause = self.random.uniform(0, 0.4)
            self.note(f"{pause:.3f} s after the start")
            time.sleep(pause)
        else:
            step = self.random.randrange(1, STEPS)
            self.note(f"at step {step}")
            self.wait_for_step(program, step)

    def finish(self, mode, root="runs"):
        """Continues the run (from its beginning if there is none yet) and compares it with an undisturbed one."""
        run = self.run_folder(root)
        program = self.resume(run, mode) if run else self.start(mode, "--run-dir", root)
        program.wait(0)
        self.compare(self.run_folder(root), mode)

    def compare(self, run, mode):
        """Checks that a run ended with the bits of an undisturbed run."""
        expected = self.references(mode)
        for name, value in result(run).items():
            if value != expected[name]:
                raise Failed(f"{name} differs from that of an undisturbed run")

    def survivors(self):
        """Returns the processes of this round that live."""
        mark = f"{MARK}={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                pass
        return found

    def check_no_survivors(self):
        """Checks that no process is left after the programs have ended."""
        until = time.monotonic() + HANG_TIMEOUT
        while left := self.survivors():
            if time.monotonic() > until:
                raise Failed(f"processes {left} are left")
            time.sleep(0.02)

    def clean(self):
        send(self.survivors(), signal.SIGKILL)
        for cleanup in reversed(self.cleanups):
            cleanup()


def lines(path):
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def workers(program):
    """Waits for the workers of a launcher and returns their ids, rank 0 first; none if the launcher has ended."""
    until = time.monotonic() + HANG_TIMEOUT
    while program.running() and time.monotonic() < until:
        if len(found := children(program.pid)) >= 2:
            return found
        time.sleep(0.005)
    return []


def result(run):
    """Returns what must not depend on disturbances: the last checkpoint, every step's loss, every epoch."""
    last = run / "checkpoints" / "last"
    progress = json.loads((last / "state.json").read_text())["progress"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with open(run / "summary.csv") as file:
        epochs = [row[:7] for row in csv.reader(file)]
    digest = lambda name: hashlib.sha256((last / name).read_bytes()).hexdigest()
    return {
        "model.safetensors": digest("model.safetensors"),
        "optimizer.safetensors": digest("optimizer.safetensors"),
        "state.json": [progress["epoch"], progress["step"], progress["best"], progress["last"]],
        "metrics.jsonl": [(step["step"], step["loss"]) for step in steps],
        "summary.csv": epochs,
    }


def saved_step(run):
    """Returns the number of steps of the newest checkpoint; 0 if there is none."""
    try:
        return json.loads((run / "checkpoints" / "last" / "state.json").read_text())["progress"]["step"]
    except FileNotFoundError:
        return 0


def send(pids, number):
    """Sends a signal to the processes that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def printed_command(text):
    """Returns the arguments of the command that the program printed to continue."""
    found = re.search(r"continue with: (.*)", text)
    if not found:
        raise Failed("no command to continue was printed")
    # The first word is the program, by the name that it was started with.
    return shlex.split(found[1])[1:]
