"""What the gate asks of an optimizer: a Keras one, or any function of gradients and variables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from scaler.backend import apply_steps, replicas
from scaler.backend.optimizers import KerasTwo, built_for, exclude_masters, is_of_keras_two, key_of, knowing_masters
from scaler.backend.variables import outside_the_graph, without_values
from scaler.errors import InvalidArgument

Optimizer: TypeAlias = Any


def check_optimizer(optimizer: Optimizer, who: str = "apply") -> None:
    """Refuses what cannot update variables, and an optimizer that scales by itself. `who` was called."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidArgument(
            f"{who}: {type(optimizer).__name__} scales losses by itself. Pass its inner_optimizer: "
            "one loss scaler is enough."
        )
    if getattr(optimizer, "loss_scale_factor", None) is not None:
        raise InvalidArgument(
            f"{who}: the optimizer divides gradients by loss_scale_factor={optimizer.loss_scale_factor!r}, after they "
            "were unscaled already. Leave loss_scale_factor unset."
        )
    if replicas.replica_count() > 1:
        _check_on_replicas(optimizer)
    if hasattr(optimizer, "get_scaled_loss"):
        raise InvalidArgument(
            f"{who}: {type(optimizer).__name__} of tf-keras scales losses by itself. Pass its inner_optimizer: one "
            "loss scaler is enough."
        )
    if isinstance(optimizer, type) or not (
        callable(optimizer) or hasattr(optimizer, "apply") or is_of_keras_two(optimizer)
    ):
        # A list of variables would print all of their values.
        several = isinstance(optimizer, (list, tuple))
        shown = f"a {type(optimizer).__name__} of {len(optimizer)}" if several else repr(optimizer)
        raise InvalidArgument(
            f"{who}: optimizer={shown}: expected a Keras optimizer such as keras.optimizers.Adam(), or "
            "a function of (grads, variables)."
            + (" Create it before the first step: it keeps its moments." if isinstance(optimizer, (str, type)) else "")
            + (
                " Of tf-keras it takes those with `build`, such as tf_keras.optimizers.Adam(), and no legacy ones."
                if hasattr(optimizer, "apply_gradients") and not isinstance(optimizer, type)
                else ""
            )
        )


def _check_on_replicas(optimizer: Optimizer) -> None:
    every = getattr(optimizer, "ema_overwrite_frequency", None)
    if every and not tf.executing_eagerly():
        raise InvalidArgument(
            f"apply: ema_overwrite_frequency={every!r} on several replicas: Keras cannot overwrite variables there "
            "inside a tf.function. Leave it out. fit assigns the averages at its end, and "
            "optimizer.finalize_variable_values(model.trainable_variables) whenever you call it."
        )
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps and not apply_steps.are_taken_over(optimizer):
        raise InvalidArgument(
            f"apply: the optimizer has gradient_accumulation_steps={steps!r}, and Keras cannot add gradients up on "
            "several replicas. Leave it out, and use hs.TrainStep(accumulate=...), or "
            "LossScaleOptimizer(optimizer), which adds them up itself."
        )


def as_called_by_the_gate(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, or what has one of Keras 2 behave like an object with `apply` and `variables`."""
    return KerasTwo(optimizer) if is_of_keras_two(optimizer) else optimizer


def build_optimizer(optimizer: Optimizer, variables: Sequence) -> None:
    """Creates a Keras optimizer's slots, for all variables and outside of any branch of the graph.

    Whatever it knows of a 16-bit variable, such as to exclude it from weight decay, it then knows of its master.

    Raises:
        InvalidArgument: If it was built for other variables before.
    """
    if isinstance(optimizer, KerasTwo):
        optimizer.build(variables)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    if not optimizer.built:
        try:
            with outside_the_graph(), knowing_masters(optimizer, variables):
                optimizer.build(list(variables))
        except ValueError as error:  # Of Adafactor, for variables of TensorFlow with a path as their name.
            if "cannot contain character" not in str(error):
                raise
            raise InvalidArgument(
                f"apply: Keras's {type(optimizer).__name__} gives its slots the names of the variables, and refuses "
                "the slash in those of float32 masters: expected another optimizer for 16-bit variables, or the "
                "policy mixed_float16, whose variables are float32."
            ) from error
        return
    known = built_for(optimizer)
    if known is None:
        return
    if not {key_of(optimizer, own) for own in known}.issuperset(key_of(optimizer, own) for own in variables):
        raise InvalidArgument(
            f"apply: the optimizer {optimizer.name!r} was built for other variables than {variables[0].name!r} and "
            "those beside it. One optimizer goes with one MasterWeights, or with one list of variables: make a new one."
        )
    exclude_masters(optimizer, variables)


def waits_for_values(optimizer: Optimizer, variables: Sequence) -> bool:
    """Whether an optimizer is to be built in the next trace, because its variables have no values in this one.

    Slots and masters may begin as copies of weights. A function that makes the weights is traced twice, and only the
    second trace ever runs.

    Raises:
        InvalidArgument: If they have no values in a second trace either.
    """
    if tf.executing_eagerly() or not isinstance(optimizer, keras.optimizers.Optimizer) or optimizer.built:
        return False
    empty = without_values(variables)
    if empty and optimizer in _WAITING:
        raise InvalidArgument(
            f"apply: variable {empty[0].name!r} has no value before the step runs: the step makes it from its own "
            "arguments. Make the variables before the first step, such as with model.build or a call on one batch."
        )
    if empty:
        _WAITING.add(optimizer)
    return bool(empty)


_WAITING: weakref.WeakSet[Any] = weakref.WeakSet()


def variables_of(optimizer: Optimizer) -> list:
    """The variables that an optimizer keeps for itself, as far as it tells: slots, iterations, the learning rate."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)


def name_of(optimizer: Optimizer) -> str:
    """What a sentence calls it."""
    kind = optimizer if hasattr(optimizer, "__name__") else type(optimizer)
    return kind.__name__


def move_nothing(grads: Sequence, variables: Sequence) -> None:
    """An optimizer for those who only want to know whether gradients are finite, and if not, why.

    `apply(move_nothing, grads, variables)` judges gradients that something else than an optimizer takes. It keeps for
    `explain` which variable is to blame. For several optimizers there is `apply_together`.
    """
    del grads, variables
