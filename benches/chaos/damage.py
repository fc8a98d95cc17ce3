"""Damaged files and full disks."""

import gzip
import os
import shutil
import struct
import subprocess
import zlib

from program import MODES, Failed

def truncate(path, random):
    os.truncate(path, random.randrange(path.stat().st_size or 1))


def flip(path, random):
    content = bytearray(path.read_bytes())
    for _ in range(random.choice([1, 1, 8])):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def garbage(path, random):
    path.write_bytes(random.randbytes(random.randrange(1, 4096)))


def delete(path, random):
    path.unlink()


def folder(path, random):
    path.unlink()
    path.mkdir()


def pipe(path, random):
    path.unlink()
    os.mkfifo(path)


def device(path, random):
    path.unlink()
    path.symlink_to("/dev/zero")


def dangling(path, random):
    path.unlink()
    path.symlink_to("nowhere")


DAMAGE = [truncate, flip, garbage, delete, folder, pipe, device, dangling]


def damaged_run(round):
    """A file of a run is damaged: the run continues to the same bits and says so, or names the file and trains nothing."""
    original = round.references.folder("single")
    run = round.folder / "runs" / original.name
    shutil.copytree(original, run, symlinks=True)
    checkpoint = os.readlink(run / "checkpoints" / "last")
    inside = [f"checkpoints/{checkpoint}/{name}" for name in os.listdir(run / "checkpoints" / checkpoint)]
    name = round.random.choice([*sorted(inside), "metrics.jsonl", "summary.csv", "config.toml", "env.json"])
    damage = round.random.choice(DAMAGE)
    round.note(f"{damage.__name__} {name}")
    damage(run / name, round.random)
    program = round.resume(run, "single")
    code = program.wait(0, 1, 2)
    said = os.path.basename(name) in program.text().partition("\n")[2]
    if code != 0:
        if not said:
            raise Failed("the error does not name the file")
        # Put the file back: the run is as it was.
        path = run / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        shutil.copy(original / name, path)
        round.finish("single")
    elif name == "config.toml":
        # Another valid value, such as another digit of a rate, is another run.
        pass
    elif said and name in ("metrics.jsonl", "summary.csv"):
        # What is lost stays lost, and the user knows.
        pass
    else:
        round.compare(run, "single")


def damaged_data(round):
    """A file of the data set is damaged: the run names the file."""
    data = round.folder / "data"
    write = round.random.choice([idx_files, image_folder])
    name, files = write(data, round.random)
    path, damage = round.random.choice(files), round.random.choice(DAMAGE)
    round.note(f"{damage.__name__} {path.relative_to(data)}")
    damage(path, round.random)
    program = round.start("single", "--epochs", "1", "--set", f"data.name={name}", "--set", f"data.dir={data}")
    code = program.wait(0, 2)
    # Another bit may be another pixel or class. One image fewer is another image folder.
    harmless = [flip] if name == "mnist" else [flip, delete, folder]
    if code == 0 and damage not in harmless:
        raise Failed("the damage was not noticed")
    if code == 2 and path.name not in program.text():
        raise Failed("the error does not name the file")


def idx_files(data, random):
    """Writes MNIST's four files with random pixels, gzipped or not."""
    data.mkdir()
    files = []
    for split, count in [("train", 96), ("t10k", 32)]:
        images = struct.pack(">4I", 0x803, count, 28, 28) + random.randbytes(count * 784)
        labels = struct.pack(">2I", 0x801, count) + bytes(random.randrange(10) for _ in range(count))
        for kind, content in [("images-idx3", images), ("labels-idx1", labels)]:
            packed = random.random() < 0.5
            files.append(data / f"{split}-{kind}-ubyte{'.gz' if packed else ''}")
            files[-1].write_bytes(gzip.compress(content) if packed else content)
    return "mnist", files


def image_folder(data, random):
    """Writes two classes of random PNGs."""
    chunk = lambda kind, content: struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    files = []
    for split, count in [("train", 20), ("test", 5)]:
        for name in ["cat", "dog"]:
            (data / split / name).mkdir(parents=True)
            for index in range(count):
                rows = b"".join(b"\0" + random.randbytes(3 * 28) for _ in range(28))
                header = struct.pack(">IIBBBBB", 28, 28, 8, 2, 0, 0, 0)
                chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
                files.append(data / split / name / f"{index}.png")
                files[-1].write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks))
    return "image-folder", files


def full_disk(round):
    """The disk fills up, or a limit on file sizes is reached: the run names the file. With space again the run continues."""
    mode = round.random.choice(list(MODES))
    disk = round.folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "trainer-chaos", disk]
    limited = round.random.random() < 0.3
    if not limited and subprocess.run(mount, capture_output=True).returncode == 0:
        round.cleanups.append(lambda: subprocess.run(["umount", "--lazy", disk], check=True))
        kib = round.random.randrange(8, 2500)
        round.note(f"{mode}, a disk of {kib} KiB")
        resize = lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
        resize(f"{kib}k")
        program = round.start(mode, "--run-dir", "disk")
    else:
        kib = round.random.randrange(1, 250)
        round.note(f"{mode}, files of at most {kib} KiB")
        resize = lambda size: None
        program = round.start(mode, "--run-dir", "disk", largest_file=kib << 10)
    if program.wait(0, 1, 3) != 0 and "disk/" not in program.text():
        raise Failed("the error does not name the file")
    round.check_no_survivors()
    resize("64m")
    round.finish(mode, "disk")


SCENARIOS = [damaged_run, damaged_data, full_disk]
