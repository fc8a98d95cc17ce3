"""Kills, stops, signals, closed terminals, two programs on one run."""

import os
import pty
import select
import signal
import threading
import time

from program import MODES, STEPS, Failed, Program, printed_command, saved_step, send, workers


def kill_worker(round):
    """SIGKILL to a worker: the launcher names it at once, and the run continues, by hand or with --max-restarts."""
    restarts = round.random.random() < 0.3
    program = round.start("ddp", *(["--max-restarts", "1"] if restarts else []))
    round.wait_for_random_moment(program)
    found = workers(program)
    rank = round.random.randrange(2)
    round.note(f"rank {rank}, {'with' if restarts else 'without'} --max-restarts")
    if found:
        send([found[rank]], signal.SIGKILL)
    code = program.wait(0, 3)
    if code == 3 and f"rank {rank} was killed by SIGKILL" not in program.text():
        raise Failed(f"the report does not name rank {rank}")
    if code == 3 and restarts:
        raise Failed("--max-restarts did not restart")
    round.check_no_survivors()
    round.finish("ddp")


def kill_all(round):
    """SIGKILL to a launcher, or to a run of one process: nothing is left, and the run continues."""
    mode = round.random.choice(list(MODES))
    for _ in range(round.random.randint(1, 2)):
        run = round.run_folder()
        program = round.resume(run, mode) if run else round.start(mode)
        round.wait_for_random_moment(program)
        round.note(mode)
        program.send(signal.SIGKILL)
        program.wait(0, -signal.SIGKILL)
        round.check_no_survivors()
    round.finish(mode)


def stop(round):
    """SIGSTOP and SIGCONT to a worker, or to a whole program: nothing happens."""
    mode = round.random.choice(list(MODES))
    program = round.start(mode)
    round.wait_for_random_moment(program)
    victims = [program.pid, *(workers(program) if mode == "ddp" else [])]
    victims = [round.random.choice(victims)] if round.random.random() < 0.7 else victims
    pause = round.random.uniform(0.1, 3)
    round.note(f"{mode}, {len(victims)} of its processes for {pause:.1f} s")
    send(victims, signal.SIGSTOP)
    time.sleep(pause)
    send(victims, signal.SIGCONT)
    program.wait(0)
    round.compare(round.run_folder(), mode)


def interrupt(round):
    """Signals that end a run, up to three times: a checkpoint of the last step, and the printed command continues."""
    mode = round.random.choice(list(MODES))
    program = round.start(mode)
    for _ in range(round.random.randint(1, 3)):
        round.wait_for_random_moment(program)
        number = round.random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
        round.note(f"{mode}, {number.name}")
        program.send(number)
        code = program.wait(0, 128 + number, -number)
        if code == 0:
            break
        if code < 0 or "continue with" not in program.text():
            # Nothing was trained yet: the signal ended the start.
            check_saved(round)
            run = round.run_folder()
            program = round.resume(run, mode) if run else round.start(mode)
            continue
        check_saved(round)
        program = Program(round, printed_command(program.text()))
    program.wait(0)
    round.compare(round.run_folder(), mode)


def check_saved(round):
    """Checks that the newest checkpoint has all steps that were reported."""
    run = round.run_folder()
    if run is None or not (run / "metrics.jsonl").exists():
        return
    steps, saved = (run / "metrics.jsonl").read_bytes().count(b"\n"), saved_step(run)
    if saved != steps:
        raise Failed(f"{steps} steps were trained, the newest checkpoint has {saved}")


def close_terminal(round):
    """The terminal of a run closes: a checkpoint is saved. From an interactive shell SIGHUP arrives twice."""
    mode, twice = round.random.choice(list(MODES)), round.random.random() < 0.7
    step = round.random.randrange(1, STEPS // 2)
    round.note(f"{mode}, at step {step}, SIGHUP {'twice' if twice else 'once'}")
    master, slave = pty.openpty()
    program = round.start(mode, terminal=slave)
    os.close(slave)
    done = threading.Event()
    reader = threading.Thread(target=read_terminal, args=(master, program.screen, done))
    reader.start()
    try:
        round.wait_for_step(program, step)
    finally:
        done.set()
        reader.join()
    # The program leads the terminal's session, so the kernel sends it SIGHUP when the last copy of the master closes.
    os.close(master)
    if twice:
        program.send(signal.SIGHUP)
    program.wait()
    round.check_no_survivors()
    check_saved(round)
    round.finish(mode)


def read_terminal(master, screen, done):
    """Copies what a terminal shows to a file, until `done` or the end of the program."""
    with open(screen, "ab", buffering=0) as file:
        while not done.is_set():
            try:
                if select.select([master], [], [], 0.01)[0]:
                    file.write(os.read(master, 65536))
            except OSError:
                return


def two_programs(round):
    """A second program resumes a run that is live: the second ends and names the first, which is not disturbed."""
    mode, bare = round.random.choice(["single", "ddp"]), round.random.random() < 0.5
    first = round.start(mode)
    step = round.random.randrange(1, STEPS // 2)
    round.wait_for_step(first, step)
    # A stopped program is live, and cannot end before the second program has looked.
    victims = [first.pid, *(workers(first) if mode == "ddp" else [])]
    send(victims, signal.SIGSTOP)
    if not first.running():
        return
    arguments = ["--resume", "--run-dir", "runs"] if bare else ["--resume", round.run_folder()]
    round.note(f"{mode}, at step {step}, {'--resume' if bare else '--resume RUN'}")
    second = Program(round, [*arguments, *MODES[mode]])
    code = second.wait(0, 1, 2, 3)
    send(victims, signal.SIGCONT)
    first.wait(0)
    round.compare(round.run_folder(), mode)
    if code == 0:
        raise Failed("the second program trained the same run")
    if not bare and not any(str(pid) in second.text() for pid in victims):
        raise Failed(f"the second program names none of the first's processes, {victims}")


SCENARIOS = [kill_worker, kill_all, stop, interrupt, close_terminal, two_programs]
