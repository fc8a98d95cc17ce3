"""Outages of the network between two machines, which are network namespaces here."""

import itertools
import os
import signal
import subprocess
import time

from program import STEPS, Failed, Program, Skipped, children, send

# Seconds without an answer after which the job restarts or ends.
TIMEOUT = 8
ADDRESSES = ["10.213.77.1", "10.213.77.2"]
JOBS = itertools.count()


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise Skipped(f"`ip {' '.join(arguments)}`: {done.stderr.strip()}")


def connect(round):
    """Makes two connected network namespaces and returns their names."""
    job = next(JOBS)
    names = [f"chaos-{os.getpid()}-{job}-{node}" for node in (0, 1)]
    for name in names:
        ip("netns", "add", name)
        round.cleanups.append(lambda name=name: ip("netns", "del", name))
        ip("-n", name, "link", "set", "lo", "up")
    ip("-n", names[0], "link", "add", "net", "type", "veth", "peer", "name", "net", "netns", names[1])
    for name, address in zip(names, ADDRESSES):
        ip("-n", name, "address", "add", f"{address}/24", "dev", "net")
        ip("-n", name, "link", "set", "net", "up")
    return names


def start(round, names, *more):
    """Starts a job on both nodes. Only node 0 has results."""
    common = ["--config", "chaos.toml", "--cpus", "1", "--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", "29500"]
    common += ["--set", f"parallel.timeout_s={TIMEOUT}", *more]
    start = lambda node, name: Program(
        round,
        [*common, "--node-rank", node, "--run-dir", f"runs-{node}"],
        prefix=["ip", "netns", "exec", name],
        TRAINER_SECRET="the chaos script's secret",
    )
    return [start(node, name) for node, name in enumerate(names)]


def undisturbed(round):
    """Runs the job without an outage, as the reference."""
    for program in start(round, connect(round)):
        program.wait(0)
    return round.run_folder("runs-0")


def outage(round):
    """The link between two nodes goes down: a short outage is survived, after a long one both nodes restart or both end."""
    names = connect(round)
    programs = start(round, names, "--max-restarts", "3")
    short = round.random.random() < 0.5
    seconds = round.random.uniform(0.2, TIMEOUT / 2) if short else round.random.uniform(1.5 * TIMEOUT, 3 * TIMEOUT)
    step = round.random.randrange(1, STEPS // 2)
    round.note(f"{seconds:.1f} s at step {step}")
    round.wait_for_step(programs[0], step, "runs-0")
    ip("-n", names[0], "link", "set", "net", "down")
    time.sleep(seconds)
    ip("-n", names[0], "link", "set", "net", "up")
    check(round, programs, must_finish=short)


def kill_on_a_node(round):
    """SIGKILL to a worker of a node: all nodes restart together."""
    programs = start(round, connect(round), "--max-restarts", "1")
    node, step = round.random.randrange(2), round.random.randrange(1, STEPS // 2)
    round.note(f"node {node} at step {step}")
    round.wait_for_step(programs[0], step, "runs-0")
    send(children(programs[node].pid), signal.SIGKILL)
    check(round, programs, must_finish=True)


def check(round, programs, must_finish):
    """Checks that both nodes finish the run, or, where they need not, that both end with an error."""
    codes = [program.wait(0, 3) for program in programs]
    round.check_no_survivors()
    if len(set(codes)) > 1:
        raise Failed(f"node 0 ended with {codes[0]}, node 1 with {codes[1]}")
    if codes[0] == 0:
        round.compare(round.run_folder("runs-0"), "nodes")
    elif must_finish:
        raise Failed("the job did not survive")


SCENARIOS = [outage, kill_on_a_node]
