"""Putting back, under `fit`, what the forward pass of a skipped step has moved."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.optimizers import built_for
from scaler.backend.versions import unsupported
from scaler.errors import InvalidArgument
from scaler.keras.of_model import loss_scale_optimizers
from scaler.keras.optimizer import LossScaleOptimizer
from scaler.keras.shown import Shown
from scaler.rollback import keep_finite
from scaler.weights.trainable import TrainableSet

_MARK = "_scaler_protected"


def protect(model: keras.Model) -> keras.Model:
    """Has a skipped step under `fit` and `train_on_batch` put back all that it moved beside the weights.

        model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam()), loss="mse")
        scaler.protect(model)

    BatchNorm's statistics, seed generators and metrics move in the forward pass, before the optimizer is asked. Around
    `model.train_step`, whichever the class has, the values of `model.variables` and of its metrics are remembered, but
    for those that an optimizer updates; if a step was skipped they are put back bit for bit. So weights that a step
    assigns by itself, such as those of a teacher that follows the model, are put back too. On an applied step elements
    of state that is not trainable are put back if they are not finite any more. If the inner optimizer accumulates
    gradients, each micro-batch that was not finite is put back; the others of its window stay counted.

    What a step returns is shown as it is, but for the model's metrics, which are computed anew. As long as all steps
    since the beginning of an epoch were skipped, they say what the last one counted, if that is finite; else, and at
    the end of such an epoch, the worst there is: infinity for a loss, minus infinity for what Keras wants large, NaN
    for what it does not know.

    The model may be one without a `call`, of models inside and with a `train_step` of its own. It holds for this
    object: call it again for a model that was loaded or cloned. Before or after `compile`, any number of times, is the
    same.

    Args:
        model: A Keras model. At its first step it must be compiled with a `LossScaleOptimizer`, or have some as
            attributes: a skip of any of them puts all of the state back.

    Returns:
        The model.

    Raises:
        InvalidArgument: For anything but a Keras model; at the first step, without a `LossScaleOptimizer`, or
            for a step that makes variables whose values before it cannot be known.
    """
    if not isinstance(model, keras.Model):
        raise InvalidArgument(f"protect({model!r}): expected a keras.Model.")
    if hasattr(model.train_step, _MARK):
        return model
    shown = Shown(model)
    made: list[bool] = []
    own_step, own_reset, own_results = model.train_step, model.reset_metrics, model.get_metrics_result

    @functools.wraps(own_step)
    def train_step(data: Any) -> Any:
        optimizers = _optimizers(model)
        # Of layers that were unfrozen the optimizer alone knows nothing.
        TrainableSet.of(model.weights).keep(f"fit of model {model.name!r}", "Compile the model again.")
        step = _with_its_variables(own_step, data, made)
        before = [(variable, tf.identity(variable)) for variable in _state(model)]
        rejected = _rejected(optimizers)
        shown.begin()
        logs = step(data)
        bad = _rejected(optimizers) > rejected
        counted = shown.results()
        _check_nothing_new(model, before)
        left = [pair for pair in before if not _updated(model, pair[0])]
        moved = [(replicas.own_component(variable), value) for variable, value in left]
        fixed = [pair for pair, (variable, _) in zip(moved, left, strict=True) if not variable.trainable]
        tf.cond(bad, lambda: _put_back(moved), lambda: _put_finite_back(fixed))
        return shown.end(logs, counted, bad)

    @functools.wraps(own_reset)
    def reset_metrics() -> None:
        own_reset()
        shown.reset()

    @functools.wraps(own_results)
    def get_metrics_result() -> dict[str, Any]:
        return shown.at_rest() if tf.executing_eagerly() else own_results()

    setattr(train_step, _MARK, True)
    model.train_step = train_step
    model.reset_metrics = reset_metrics
    model.get_metrics_result = get_metrics_result
    model.train_function = None
    return model


def _optimizers(model: keras.Model) -> list[LossScaleOptimizer]:
    found = loss_scale_optimizers(model)
    if not found:
        raise InvalidArgument(
            f"protect: model {model.name!r} has no scaler.LossScaleOptimizer, which says whether a step was skipped. "
            "Pass one to compile(optimizer=...), or make it an attribute of the model."
        )
    return list(found.values())


def _with_its_variables(step: Callable, data: Any, made: list[bool]) -> Callable:
    """The step, traced so that it has made its variables before it runs; they can then be read before it."""
    # Replicas cannot meet in a function inside of their own. Keras builds models before, there.
    if replicas.replica_count() > 1:
        return step
    traced = tf.function(functools.partial(_making_variables_outside, step), autograph=False)
    if not tf.executing_eagerly():
        traced.get_concrete_function(data)
        return traced
    if not made:
        made.append(True)
        # A step that runs eagerly need not be one that can be traced.
        with contextlib.suppress(Exception):
            traced.get_concrete_function(data)
    return step


def _making_variables_outside(step: Callable, data: Any) -> Any:
    def create(next_creator: Any, **arguments: Any) -> Any:
        value = arguments["initial_value"]
        if tf.is_tensor(value) and not hasattr(value, "numpy"):
            return next_creator(**arguments)
        with tf.init_scope():
            return next_creator(**arguments)

    with tf.variable_creator_scope(create):
        return step(data)


def _state(model: keras.Model) -> list:
    """All variables of the model but those that an optimizer is known to update."""
    variables = {id(v): v for v in (*model.variables, *model.metrics_variables)}
    return [variable for variable in variables.values() if not _updated(model, variable)]


def _updated(model: keras.Model, variable: Any) -> bool:
    for optimizer in vars(model).values():
        if isinstance(optimizer, LossScaleOptimizer):
            if optimizer.updates(variable):
                return True
        elif isinstance(optimizer, keras.optimizers.Optimizer) and optimizer.built:
            known = built_for(optimizer)
            if known is None:
                raise unsupported("protect", f"does not tell which variables {type(optimizer).__name__} updates.")
            if any(variable is own for own in known):
                return True
    return False


def _check_nothing_new(model: keras.Model, before: list) -> None:
    known = {id(variable) for variable, _ in before}
    new = [variable.path for variable in _state(model) if id(variable) not in known]
    if new:
        raise InvalidArgument(
            f"protect: the train step of model {model.name!r} made the variables {new}, so that it is not known what "
            "to put back. Make them before fit: call the models and layers inside on one batch, and metrics on one "
            "pair of targets and predictions."
        )


def _rejected(optimizers: list[LossScaleOptimizer]) -> tf.Tensor:
    return tf.add_n([optimizer.rejected for optimizer in optimizers])


def _put_back(moved: list) -> None:
    for variable, value in moved:
        variable.assign(value)


def _put_finite_back(moved: list) -> None:
    for variable, value in moved:
        if value.dtype.is_floating:
            variable.assign(keep_finite(variable, value))
