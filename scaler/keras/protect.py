"""Putting back, under `fit`, what the forward pass of a skipped step has moved."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from scaler import replicas
from scaler.errors import InvalidArgument
from scaler.keras.optimizer import LossScaleOptimizer
from scaler.rollback import keep_finite
from scaler.trainable import TrainableSet

_MARK = "_scaler_protected"


def protect(model: keras.Model) -> keras.Model:
    """Has a skipped step under `fit` and `train_on_batch` put back all that it moved beside the weights.

        model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam()), loss="mse")
        scaler.protect(model)

    BatchNorm's statistics, seed generators and metrics move in the forward pass, before the optimizer is asked. Around
    `model.train_step`, whichever the class has, their values are remembered, and put back bit for bit if a step was
    skipped; metrics in what it returns are computed anew. On an applied step elements that are not finite any more are
    put back. If the inner optimizer accumulates gradients, each micro-batch that was not finite is put back; the others
    of its window stay counted.

    It holds for this object: call it again for a model that was loaded or cloned. Before or after `compile`, any number
    of times, is the same.

    Args:
        model: A Keras model. At its first step it must be compiled with a `LossScaleOptimizer`, or have some as
            attributes: a skip of any of them puts all of the state back.

    Returns:
        The model.

    Raises:
        InvalidArgument: For anything but a Keras model; at the first step, without a `LossScaleOptimizer`, or
            for a model that cannot be built on a batch.
    """
    if not isinstance(model, keras.Model):
        raise InvalidArgument(f"protect({model!r}): expected a keras.Model.")
    if hasattr(model.train_step, _MARK):
        return model
    step = model.train_step

    @functools.wraps(step)
    def train_step(data):
        optimizers = _optimizers(model)
        state = _state(model, data)
        # Of layers that were unfrozen the optimizer alone knows nothing.
        TrainableSet.of(model.weights).keep(f"fit of model {model.name!r}", "Compile the model again.")
        before, rejected = [tf.identity(variable) for variable in state], _rejected(optimizers)
        logs = step(data)
        bad = _rejected(optimizers) > rejected
        own = [replicas.own_component(variable) for variable in state]
        tf.cond(bad, lambda: _put_back(own, before), lambda: _put_finite_back(own, before))
        fresh = model.get_metrics_result() if isinstance(logs, dict) else {}
        return {name: fresh.get(name, value) for name, value in logs.items()} if fresh else logs

    setattr(train_step, _MARK, True)
    model.train_step = train_step
    model.train_function = None
    return model


def _optimizers(model: keras.Model) -> list[LossScaleOptimizer]:
    found = {id(value): value for value in vars(model).values() if isinstance(value, LossScaleOptimizer)}
    if not found:
        raise InvalidArgument(
            f"protect: model {model.name!r} has no scaler.LossScaleOptimizer, which says whether a step was skipped. "
            "Pass one to compile(optimizer=...)."
        )
    return list(found.values())


def _state(model: keras.Model, data) -> list:
    """What a step moves beside the weights; made now if the first step is yet to make it."""
    metrics_wait = any(not getattr(metric, "built", True) for metric in model.metrics)
    if not model.built or metrics_wait:
        try:
            model._symbolic_build(data_batch=data)
        except Exception as error:  # A layer of the user's may raise anything.
            raise InvalidArgument(
                f"protect: model {model.name!r} could not be built on the first batch, so that it is not known what to "
                f"put back: {error}. Is the batch of the right shape? Then call the model on one before fit."
            ) from error
    return list({id(v): v for v in (*model.non_trainable_variables, *model.metrics_variables)}.values())


def _rejected(optimizers: list[LossScaleOptimizer]) -> tf.Tensor:
    return tf.add_n([optimizer.rejected for optimizer in optimizers])


def _put_back(own: list, before: list) -> None:
    for variable, value in zip(own, before, strict=True):
        variable.assign(value)


def _put_finite_back(own: list, before: list) -> None:
    for variable, value in zip(own, before, strict=True):
        if value.dtype.is_floating:
            variable.assign(keep_finite(variable, value))
