"""What dynamic scaling adds to a train step on two replicas, beside the same step without a scaler and with Keras's.

    python benchmarks/replicas.py [--json] [--quick]

A `MirroredStrategy` on two logical CPUs, a network of convolutions with BatchNorm, whose moving averages a skipped step
puts back. Keras's scaler looks at the first replica's gradients alone and puts nothing back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import models
import paired
import tensorflow as tf

import loops
import scaler

KERAS, PLAIN = "Keras LossScaleOptimizer", "no scaler"
TO_PLAIN, TO_KERAS = 1.05, 1.00
SECONDS = 6.0
REPLICAS = 2


def network(policy: str, blocks: int) -> models.Problem:
    """Narrow residual blocks: many small variables."""
    return models.resnet(policy, filters=(16,) * blocks, size=16, batch_size=16)


def contender(
    strategy: tf.distribute.Strategy, side: str, make: Callable[[], models.Problem]
) -> Callable[[], tf.Tensor]:
    """A step on every replica, each on a batch of its own."""
    with strategy.scope():
        problem = make()
        inner = keras.optimizers.Adam(1e-4)
        optimizer = keras.optimizers.LossScaleOptimizer(inner) if side == KERAS else inner
        optimizer.build(problem.model.trainable_variables)
        step = _ours(problem, optimizer) if side == "halfstep" else _keras(problem, optimizer)

    @tf.function
    def on_all() -> tf.Tensor:
        return strategy.reduce("MEAN", strategy.run(step), axis=None)

    return on_all


def _ours(problem: models.Problem, optimizer: keras.optimizers.Optimizer) -> Callable[[], tf.Tensor]:
    step = loops.TrainStep(problem.model, problem.loss, optimizer, loss_scaler=scaler.LossScaler(scaler.Dynamic()))
    return lambda: step(problem.batch)["loss"]


def _keras(problem: models.Problem, optimizer: keras.optimizers.Optimizer) -> Callable[[], tf.Tensor]:
    model, (x, y) = problem.model, problem.batch

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = problem.loss(y, model(x, training=True))
            # On several replicas the mean over all samples is what is differentiated, as `TrainStep` does it.
            scaled = optimizer.scale_loss(loss / tf.distribute.get_strategy().num_replicas_in_sync)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def run(quick: bool) -> paired.Report:
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(REPLICAS)])
    figures, found = [], {}
    for blocks in (1,) if quick else (4, 8):
        sides = ("halfstep", KERAS, PLAIN)
        make = functools.partial(network, "mixed_float16", blocks)
        taken = paired.take_turns({side: contender(strategy, side, make) for side in sides}, SECONDS, quick, threads=1)
        title = f"{REPLICAS} replicas, {len(network('float32', blocks).model.trainable_variables)} variables"
        found[title] = paired.case(taken, PLAIN)
        figures.append(paired.figure(f"{title}: to {PLAIN}", taken, "halfstep", PLAIN, TO_PLAIN))
        figures.append(paired.figure(f"{title}: to {KERAS}", taken, "halfstep", KERAS, TO_KERAS))
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "replicas", run)
