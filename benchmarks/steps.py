"""Train steps with and without a loss scaler, of the same model: what a user turns on and off."""

from __future__ import annotations

from collections.abc import Callable

import keras
import models
import tensorflow as tf

import loops
import scaler


def halfstep(problem: models.Problem, loss_scaler: scaler.LossScaler | None = None, **arguments) -> Callable:
    """A `TrainStep` with dynamic scaling, or with another scaler."""
    step = loops.TrainStep(
        problem.model,
        problem.loss,
        keras.optimizers.Adam(1e-4),
        loss_scaler=loss_scaler or scaler.LossScaler(scaler.Dynamic()),
        **arguments,
    )
    return lambda: step(problem.batch)["loss"]


def plain(problem: models.Problem) -> Callable:
    """The same step without any scaler: no scaling, no check, no way back."""
    return _keras(problem, keras.optimizers.Adam(1e-4))


def keras_scaled(problem: models.Problem) -> Callable:
    """The same step with Keras's loss scaler."""
    return _keras(problem, keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-4)))


def _keras(problem, optimizer):
    model, (x, y) = problem.model, problem.batch
    optimizer.build(model.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = problem.loss(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    return step


KERAS = "Keras LossScaleOptimizer"
STEPS = {"halfstep": halfstep, KERAS: keras_scaled, "no scaler": plain}
