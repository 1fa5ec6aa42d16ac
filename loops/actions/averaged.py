"""A model that predicts with the moving average of its weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.steps import averages
from loops.support.errors import LoopError, check


class Averaged:
    """The model with the exponential moving average of its weights. The model itself keeps its own weights.

        optimizer = keras.optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.999)
        evaluate = loops.Evaluate(loops.Averaged(model, optimizer), test_data, [accuracy], every=500)

    The average is Keras's: the optimizer updates it with every applied step, in float32, or in float64 for float64
    weights, from the master weights if there are any, and saved with it. Before the first applied step it equals the
    weights. Non-trainable state, such as BatchNorm's statistics, is the model's. So are the scales and histories of
    Keras's float8 layers, of which Keras has no average.

    Calling this object assigns no variable, so an interruption cannot leave the average in the model. `swapped` assigns
    it for a while, to save or export the model.

    Args:
        model: A Keras model.
        optimizer: The Keras optimizer that trains it, made with `use_ema=True`.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer):
        check(f"Averaged(model={model!r})", isinstance(model, keras.Model), "a keras.Model")
        if not getattr(optimizer, "use_ema", False):
            raise scaler.InvalidArgument(
                f"Averaged(optimizer={optimizer!r}): expected a Keras optimizer that averages weights, such as "
                "keras.optimizers.Adam(use_ema=True, ema_momentum=0.999)."
            )
        self._model, self._optimizer = model, optimizer

    def __call__(self, x: Any, training: bool = False) -> Any:
        """The model's prediction with averaged weights, for inference.

        Args:
            x: An input of the model.
            training: Must be False.

        Raises:
            scaler.InvalidArgument: For `training=True`.
            LoopError: Before the first attempted step, or if the optimizer trains another model.
        """
        if training:
            raise scaler.InvalidArgument(
                "Averaged(...)(x, training=True): averaged weights are not trained. Use the model."
            )
        state = [tf.convert_to_tensor(variable) for variable in self._model.non_trainable_variables]
        with tf.name_scope("averaged"):  # At the root of a graph a layer's name must not begin with an underscore.
            return self._model.stateless_call(self.weights(), state, x, training=False)[0]

    def weights(self) -> list[tf.Tensor]:
        """The averages of `model.trainable_variables`, in the variables' dtypes.

        Raises:
            LoopError: Before the first attempted step, or if the optimizer trains another model.
            scaler.UnsupportedVersion: If the installed Keras keeps its averages in an unknown place.
        """
        variables = self._model.trainable_variables
        found = averages(self._optimizer)
        if found is None:
            raise LoopError(
                "Averaged: there is no average before the first step, at which the optimizer makes its variables. "
                "Train first, or evaluate the model itself."
            )
        averaged, targets = found
        # A 16-bit variable is trained through another variable, its master. The optimizer has an order of its own.
        own = {id(getattr(trained, "copy_of", trained)): (one, trained) for one, trained in zip(*found, strict=True)}
        missing = [variable for variable in variables if id(variable) not in own]
        if missing and [tuple(one.shape) for one in targets] != [tuple(one.shape) for one in variables]:
            raise LoopError(
                f"Averaged: the optimizer {self._optimizer.name!r} averages {len(averaged)} variables of other shapes "
                f"than the {len(variables)} of model {self._model.name!r}. Give the optimizer that trains this model."
            )
        if missing:
            raise LoopError(
                f"Averaged: the optimizer {self._optimizer.name!r} trains another {missing[0].path!r} than that of "
                f"model {self._model.name!r}. Give the optimizer that trains this model."
            )
        pairs = [own[id(variable)] for variable in variables]
        averages_of = [trained if one is None else one for one, trained in pairs]
        started = tf.convert_to_tensor(self._optimizer.iterations) > 0
        return [
            tf.where(started, tf.saturate_cast(tf.convert_to_tensor(average), variable.dtype), variable)
            for average, variable in zip(averages_of, variables, strict=True)
        ]

    @contextlib.contextmanager
    def swapped(self) -> Iterator[keras.Model]:
        """Assigns the average to the model within a `with` statement, to save or export it, then restores the weights.

        Do not train or assign weights within it: what they became is dropped, and a warning says so.

        Yields:
            The model.

        Raises:
            LoopError: Before the first attempted step, or if the optimizer trains another model.
        """
        variables = self._model.trainable_variables
        own = [tf.identity(variable) for variable in variables]
        averaged = self.weights()
        try:
            _assign(variables, averaged)
            yield self._model
        finally:
            left = [tf.identity(variable) for variable in variables]
            _assign(variables, own)
        _warn_of_changes(variables, averaged, left)


def _warn_of_changes(variables: list, averaged: list, left: list) -> None:
    """Warns if the weights that a `with` block left are not the averages that it began with."""
    changed = [
        variable.path
        for variable, before, after in zip(variables, averaged, left, strict=True)
        if not np.array_equal(before.numpy(), after.numpy(), equal_nan=True)
    ]
    if changed:
        warnings.warn(
            f"Averaged.swapped(): {len(changed)} of {len(variables)} weights were trained or assigned within it, "
            f"{changed[0]!r} first. What they became is dropped: the model has the weights from before again, while "
            "the optimizer's variables, its iterations and the counters of a loop have moved on. Train outside of it.",
            UserWarning,
            stacklevel=4,
        )


def _assign(variables: list, values: list) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
