"""A run that other processes start, kill and start again."""

import ctypes
import hashlib
import json
import os
import pathlib
import shutil
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from models import squared_error

import loops
import scaler

STEPS = 30
NO_DISK = 77
"""Status of a process that may not have a disk of its own."""


def run_to_end(folder, steps=STEPS, slow=None, actions=(), background=False):
    """Goes on to the last step, and leaves there what the run came to.

    `slow` names a moment that lasts long, and is marked by a file of that name: trace, evaluation or save. `actions`
    find the last save whole.
    """
    folder = pathlib.Path(folder)
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input([16]),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(256, use_bias=False),
        ]
    )
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=7))
    step = loops.TrainStep(model, squared_error, optimizer, loss_scaler=loss_scaler)

    def slow_trace(batch):
        linger("trace", slow, folder)
        return step(batch)

    slow_trace.model, slow_trace.optimizer, slow_trace.loss_scaler = model, optimizer, loss_scaler
    checkpoint = loops.Checkpoint(folder / "ckpt", every=2, keep=2, resume=True, background=background)
    loop = loops.Loop(
        slow_trace,
        batches(),
        steps_per_call=2,
        actions=[
            *([lambda visit: checkpoint.wait(), *actions] if actions else []),
            checkpoint,
            loops.JsonLines(folder / "steps.jsonl"),
            Evaluation(folder, slow),
        ],
    )
    loop.run(steps)
    digest = hashlib.sha256()
    for variable in (*model.variables, *optimizer.variables):
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    lines = (folder / "steps.jsonl").read_text()
    found = {"weights": digest.hexdigest(), "counters": str(loop.counters), "lines": lines}
    (folder / "end.json").write_text(json.dumps(found))


def run_beside(folder):
    """The same with checkpoints that a thread writes."""
    run_to_end(folder, background=True)


def run_on_a_full_disk(folder, number, room, background):
    """From a step on a small disk of its own has so much room; then it is emptied, and the run goes on.

    What the folder held last is copied to `copy` in it. Exits with `NO_DISK` where there can be no such disk.
    """
    folder = pathlib.Path(folder)
    disk = folder / "disk"
    disk.mkdir()
    _mount(disk, size=8 * 2**20)

    def fill(visit):
        if visit.counters.data == number:
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            (disk / "filler").write_bytes(bytes(max(free - room, 0)))

    try:
        run_to_end(disk, actions=[fill], background=background)
    except (loops.LoopError, OSError) as error:
        (folder / f"error {type(error).__name__}").write_text(str(error))
    (disk / "filler").unlink()
    run_to_end(disk, background=background)
    shutil.copytree(disk, folder / "copy")


def _mount(place, size):
    """A file system in memory, seen by this process alone, and gone with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, new_user = 0x00020000, 0x10000000
    flags = new_namespace if os.geteuid() == 0 else new_namespace | new_user
    private = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE: nothing of it reaches others.
    made = (
        libc.unshare(flags) == 0
        and libc.mount(b"none", b"/", None, private, None) == 0
        and libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, f"size={size}".encode()) == 0
    )
    if not made:
        sys.exit(NO_DISK)


class Evaluation:
    """An action with a state of its own."""

    def __init__(self, folder, slow):
        self.folder, self.slow, self.seen = folder, slow, 0

    def __call__(self, visit):
        self.seen += visit.counters.data
        linger("evaluation", self.slow, self.folder)

    def save_state(self):
        linger("save", self.slow, self.folder)
        return self.seen

    def load_state(self, value):
        self.seen = value


def linger(here, slow, folder):
    if here == slow:
        (folder / here).touch()
        time.sleep(1.0)


def batches():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 16)).astype(np.float32), random.normal(size=(64, 256)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=1).repeat().batch(8, drop_remainder=True)


def exit_as_a_script(folder, slow, background):
    """The same as a script's main, with Python's own exit status for Ctrl-C."""
    try:
        run_to_end(folder, slow=slow, background=background)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def end(folder):
    """What a finished run left, or None."""
    path = pathlib.Path(folder) / "end.json"
    return json.loads(path.read_text()) if path.exists() else None


def command(folder, *arguments):
    """The command line, in a process of its own."""
    import halfstep as cli

    with (
        (pathlib.Path(folder) / "errors.txt").open("w") as sys.stderr,
        (pathlib.Path(folder) / "out.json").open("w") as sys.stdout,
    ):
        sys.exit(cli.main([str(argument) for argument in arguments]))
