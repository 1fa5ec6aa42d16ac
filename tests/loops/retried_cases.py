"""A run with retry that other processes start, kill and start again, on one device or on two logical CPUs."""

import contextlib
import hashlib
import json
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

import loops
import loops.tasks
import scaler

STEPS, EVERY = 21, 5


class Waits:
    """Marks a step by a file, and waits there for the end of the process."""

    def __init__(self, step, folder):
        self.step, self.folder, self.retries = step, folder, 0

    def __call__(self, visit):
        self.retries += int(visit.outputs["retries"].sum())
        if visit.counters.data == self.step:
            (self.folder / f"at {self.step}").touch()
            time.sleep(600)


def train_with_retry(folder, name, replicas, policy, initial_scale, waits_at=None):
    """Goes on from the newest checkpoint to the last step, and leaves there what the run came to.

    Args:
        folder: Of the run.
        name: A task.
        replicas: Logical CPUs.
        policy: The dtype policy.
        initial_scale: Of the scaler.
        waits_at: The step at which it waits for a kill; None for none.
    """
    folder = pathlib.Path(folder)
    cpus = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
    keras.utils.set_random_seed(0)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(replicas)]) if replicas > 1 else None
    task = loops.tasks.load(name)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, optimizer = task.model(policy), keras.optimizers.Adam(1e-3)
        loss_scaler = scaler.LossScaler(scaler.Dynamic(initial_scale))
        step = loops.TrainStep(model, task.loss, optimizer, loss_scaler=loss_scaler, retry=True)
    waits = Waits(waits_at, folder)
    actions = [loops.Checkpoint(folder / "checkpoints", every=EVERY, resume=True), waits]
    counters = loops.Loop(step, task.dataset(32, seed=0), strategy=strategy, steps_per_call=1, actions=actions).run(
        STEPS
    )
    digest = hashlib.sha256()
    masters = step.masters.weights if step.masters else []
    for variable in (*model.variables, *masters, *optimizer.variables):
        for part in getattr(getattr(variable, "value", variable), "values", [variable]):
            digest.update(np.ascontiguousarray(np.asarray(part)).tobytes())
    found = {
        "bits": digest.hexdigest(),
        "scale": float(loss_scaler.loss_scale),
        "applied": counters.applied,
        "attempted": counters.attempted,
        "retries": waits.retries,
    }
    (folder / "end.json").write_text(json.dumps(found))
