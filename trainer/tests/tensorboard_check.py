"""Reads a run folder's TensorBoard events with the real tensorboard package and compares them with the run's own files.

    pip install tensorboard
    python trainer/tests/tensorboard_check.py RUN

Checks that every event file opens as TensorBoard wants it, that each begins a session, that no step is left
over from what a resume ran again, and that each scalar is that of metrics.jsonl or summary.csv. Exit code 0 or 1.
"""

import csv
import glob
import json
import math
import os
import struct
import sys

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.util import tensor_util


def f32(value):
    """The value as TensorBoard keeps it; JSON's null is NaN."""
    return math.nan if value in (None, "") else struct.unpack("f", struct.pack("f", float(value)))[0]


def close(a, b, digits):
    """Equal up to the digits that the text file keeps."""
    # what is not finite is null in metrics.jsonl, whatever it was
    return not math.isfinite(a) if math.isnan(b) else a == b or abs(a - b) <= 0.51 * 10.0**-digits + 1e-6 * abs(b)


def check(run):
    """All complaints about one run folder."""
    complaints = []
    files = sorted(glob.glob(os.path.join(glob.escape(run), "events.out.tfevents.*")))
    if not files:
        return ["no event files"]
    for file in files:
        events = list(EventFileLoader(file).Load())
        if not events or events[0].file_version != "brain.Event:2":
            complaints.append(f"{file}: does not begin with the file version")
        elif len(events) < 2 or events[1].session_log.status != SessionLog.START:
            complaints.append(f"{file}: does not go on with a session start")

    accumulator = EventAccumulator(run, size_guidance={"tensors": 0})
    accumulator.Reload()
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as lines:
        steps = [json.loads(line) for line in lines]
    with open(os.path.join(run, "summary.csv"), encoding="utf-8", newline="") as lines:
        epochs = [row for row in csv.DictReader(lines) if row["eval_top1"]]
    by_step = {step["step"]: step for step in steps}
    last_of = {step["epoch"]: step["step"] for step in steps}
    by_end = {last_of[int(row["epoch"])]: row for row in epochs}

    # tag -> records by step, their column, digits in the file, whether every record has a point
    columns = {
        "train/loss": (by_step, "loss", 9, False),
        "train/top1": (by_step, "top1", 3, False),
        "train/lr": (by_step, "lr", 9, False),
        "train/images_per_s": (by_step, "images_per_s", 1, False),
    }
    if epochs:
        columns |= {f"eval/{name}": (by_end, f"eval_{name}", 4, True) for name in ("loss", "top1", "top5")}
    tags = accumulator.Tags()["tensors"]
    if sorted(tags) != sorted(columns):
        complaints.append(f"tags {sorted(tags)}, not {sorted(columns)}")
    for tag in set(tags) & set(columns):
        records, column, digits, every = columns[tag]
        points = accumulator.Tensors(tag)
        where = [point.step for point in points]
        if any(b <= a for a, b in zip(where, where[1:])):
            complaints.append(f"{tag}: steps are not increasing, a resume left some over: {where}")
        if every and where != sorted(records):
            complaints.append(f"{tag}: steps {where}, not {sorted(records)}")
        if not every and (not where or where[-1] != max(records)):
            complaints.append(f"{tag}: ends at step {where[-1:]}, not {max(records)}")
        for point in points:
            value = tensor_util.make_ndarray(point.tensor_proto).item()
            record = records.get(point.step)
            if record is None or not close(value, f32(record[column]), digits):
                complaints.append(f"{tag}: step {point.step} is {value}, not {record and record[column]}")
    print(f"{run}: {len(files)} event files, {len(tags)} tags, {len(steps)} steps, {len(epochs)} evaluations")
    return complaints


def main():
    """Checks the run folders that are named on the command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    complaints = [complaint for run in sys.argv[1:] for complaint in check(run)]
    print("\n".join(complaints) or "TensorBoard reads what the run wrote")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
