"""A run that other processes start, kill and start again.

Processes are forked from a server that has imported TensorFlow but not used it: a start costs its trace alone.
"""

import functools
import hashlib
import json
import multiprocessing
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler

STEPS = 30


@functools.cache
def server():
    """Where processes come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras", "loops", "loops.cli"])
    return context


def start(target, *arguments):
    """Starts `target(*arguments)` in a process of its own."""
    process = server().Process(target=target, args=arguments)
    process.start()
    return process


def run_to_end(folder, steps=STEPS, slow=None):
    """Goes on to the last step, and leaves there what the run came to.

    `slow` names a moment that lasts long, and is marked by a file of that name: trace, evaluation or save.
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
    optimizer = keras.optimizers.Adam(1e-3)
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=7))
    step = loops.TrainStep(model, squared_error, optimizer, loss_scaler=loss_scaler)

    def slow_trace(batch):
        linger("trace", slow, folder)
        return step(batch)

    slow_trace.model, slow_trace.optimizer, slow_trace.loss_scaler = model, optimizer, loss_scaler
    loop = loops.Loop(
        slow_trace,
        batches(),
        steps_per_call=2,
        actions=[
            loops.Checkpoint(folder / "ckpt", every=2, keep=2, resume=True),
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


def squared_error(y, prediction):
    return tf.reduce_mean(tf.square(prediction - y))


def batches():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 16)).astype(np.float32), random.normal(size=(64, 256)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=1).repeat().batch(8, drop_remainder=True)


def exit_as_a_script(folder, slow):
    """The same as a script's main, with Python's own exit status for Ctrl-C."""
    try:
        run_to_end(folder, slow=slow)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def end(folder):
    """What a finished run left, or None."""
    path = pathlib.Path(folder) / "end.json"
    return json.loads(path.read_text()) if path.exists() else None


def command(folder, *arguments):
    """The command line, in a process of its own."""
    from loops import cli

    with (
        (pathlib.Path(folder) / "errors.txt").open("w") as sys.stderr,
        (pathlib.Path(folder) / "out.json").open("w") as sys.stdout,
    ):
        sys.exit(cli.main([str(argument) for argument in arguments]))
