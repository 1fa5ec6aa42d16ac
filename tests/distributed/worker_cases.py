"""Runs on two workers that a test starts, kills and starts again, on the loopback interface."""

import hashlib
import json
import os
import pathlib
import random
import signal
import socket
import traceback

import keras
import models
import numpy as np
import replica_cases as cases
import tensorflow as tf
from processes import start, wait_for

import loops
import scaler
from loops.actions import saves

END, EVERY = 10, 3


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def configuration(ports, index):
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def start_workers(target, *arguments, count=2):
    """Starts `target(index, *arguments)` as each worker."""
    ports = free_ports(count)
    return [start(as_worker, configuration(ports, index), target, index, *arguments) for index in range(count)]


def as_worker(config, target, index, *arguments):
    os.environ.update(TF_CONFIG=config, CUDA_VISIBLE_DEVICES="")
    target(index, *arguments)


def statuses(processes, seconds=240):
    """How they ended; those that do not are killed."""
    try:
        for process in processes:
            process.join(seconds)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


class Worker:
    """One worker's part of a run: float16 with masters, BatchNorm, dropout, windows of two, and numbers of its own."""

    def __init__(self, index, folder, actions=(), background=False):
        self.index, self.folder, self.noise = index, pathlib.Path(folder), []
        strategy = loops.join_workers(120)
        keras.utils.set_random_seed(1 + index)
        with strategy.scope():
            self.model = models.stateful_model("float16")
            self.optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
            self.loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**4, growth_interval=2))
            self.step = loops.TrainStep(
                self.model, cases.squared_error, self.optimizer, loss_scaler=self.loss_scaler, accumulate=2
            )
        np.random.seed(10 + index)
        self.loop = loops.Loop(
            self.step,
            batches(),
            steps_per_call=1,  # An action draws numbers at each visit.
            strategy=strategy,
            actions=[
                loops.JsonLines(self.folder / "steps.jsonl"),
                self,
                *actions,
                loops.Checkpoint(self.folder / "ckpt", every=EVERY, keep=2, resume=True, background=background),
            ],
        )

    def __call__(self, visit):
        self.noise.append([random.random(), float(np.random.normal())])

    def save_state(self):
        return self.noise

    def load_state(self, value):
        self.noise = list(value)

    def leave(self):
        """What this worker came to, in files of its own."""
        shared = [*self.model.trainable_variables, *self.step.masters.weights, *self.optimizer.variables]
        own = [*self.model.non_trainable_variables, *self.step.window.variables]
        found = {
            "shared": digests([*shared, *self.loss_scaler.variables]),
            "own": digests(own),
            "noise": self.noise,
            "counters": str(self.loop.counters),
            "next": next(self.loop.position.iterator)[0].numpy().tobytes().hex()[:64],
        }
        if self.index == 0:
            found["lines"] = (self.folder / "steps.jsonl").read_text()
        (self.folder / f"end-{self.index}.json").write_text(json.dumps(found))


def batches():
    """Seven batches in an order that differs between epochs; the fourth that is taken overflows on worker 1."""
    x, y = cases.batch(5, size=56)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(56, seed=3).repeat().batch(8, drop_remainder=True)

    def spoil(number, batch):
        inputs, targets = batch
        rows = tf.cast(tf.range(8) == 6, tf.float32)[:, tf.newaxis]
        return tf.where(tf.equal(number, 4), inputs + rows * 1e30, inputs), targets

    return tf.data.Dataset.zip((tf.data.Dataset.range(1, 10**6), shuffled)).map(spoil).prefetch(2)


def digests(variables):
    parts = [part for one in cases.components(variables) for part in one]
    return [hashlib.sha256(part.tobytes()).hexdigest()[:16] for part in parts]


def ends(folder):
    """What both workers came to."""
    return [json.loads((pathlib.Path(folder) / f"end-{index}.json").read_text()) for index in (0, 1)]


def run_to_end(index, folder, background=False):
    worker = Worker(index, folder, background=background)
    worker.loop.run(END)
    worker.leave()


def explained(index, folder):
    worker = Worker(index, folder, [loops.Explain(seconds=0)])
    worker.loop.run(END)
    worker.leave()


def killed(index, folder, victim):
    """One is killed after its sixth step, which the other has saved and it has not; the other writes what it saw."""

    def die(visit):
        if index == victim and visit.counters.data == 6:
            # A moment earlier the other could still be in its sixth step, which would fail and not be saved.
            wait_for(lambda: saved(folder, 1 - victim) == 6)
            os.kill(os.getpid(), signal.SIGKILL)

    worker = Worker(index, folder, [die])
    try:
        worker.loop.run(END)
    except loops.WorkerLost as error:
        (pathlib.Path(folder) / "lost").write_text(str(error))
        raise SystemExit(7) from error


def killed_beside(index, folder, victim):
    """One is killed while a thread of it writes the sixth step."""
    write = saves.write

    def die(place, number, copied):
        if index == victim and number == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        write(place, number, copied)

    saves.write = die
    try:
        Worker(index, folder, background=True).loop.run(END)
    except loops.WorkerLost:
        raise SystemExit(7) from None


def told(index, folder, background):
    """An error on one, a signal to the other, an action that stops the first: each ends both, and both go on."""
    report = []

    def act(visit):
        if index == 1 and visit.counters.data == 2:
            raise ValueError("of the user")
        if index == 0 and visit.counters.data == 5:
            signal.raise_signal(signal.SIGTERM)

    stop = loops.StopWhen(lambda visit: index == 1 and visit.counters.data == 7 and "seven")
    worker = Worker(index, folder, [act, stop], background)
    for _ in range(4):
        try:
            worker.loop.run(END)
        except (Exception, SystemExit) as error:
            report.append([type(error).__name__, str(error), worker.loop.counters.data, saved(folder, index)])
        else:
            report.append(["", worker.loop.stopped, worker.loop.counters.data, saved(folder, index)])
    (pathlib.Path(folder) / f"report-{index}.json").write_text(json.dumps(report))


def saved(folder, index):
    place = pathlib.Path(folder) / "ckpt" / ("worker-1" if index else "")
    return max(int(path.stem[5:]) for path in place.glob("ckpt-*.index"))


def joins_nobody(index, folder, seconds):
    """Waits for peers that take connections and never answer."""
    try:
        loops.join_workers(seconds)
    except BaseException:
        (pathlib.Path(folder) / "error").write_text(traceback.format_exc())
        raise
