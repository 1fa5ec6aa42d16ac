"""Rolls variables back to their values before a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.autograph import no_autograph
from scaler.backend.graphs import call_noninlined, has_gpu, in_xla
from scaler.checks import as_variables
from scaler.errors import InvalidArgument
from scaler.misuse.moving_statistics import warn_if_late


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Variables and the values that they had when `snapshot` was called."""

    variables: tuple
    values: tuple[tf.Tensor, ...]

    @no_autograph
    def restore(self) -> None:
        """Restores the saved value of every variable, bit for bit."""
        for variable, value in zip(self.variables, self.values, strict=True):
            variable.assign(value)

    @no_autograph
    def restore_unless(self, kept: tf.Tensor) -> None:
        """Restores all values unless `kept`, scalar bool, is true, then those that are not finite: `state_to_keep`."""
        found = state_to_keep(self.variables, self.variables, self.values, [kept] * len(self.values))
        for variable, value in zip(self.variables, found, strict=True):
            variable.assign(value)


@no_autograph
def snapshot(variables: Iterable) -> Snapshot:
    """Saves the values of `variables` for the `rollback` argument of `LossScaler.apply`.

    Take it before the forward pass: `before = scaler.snapshot(model.non_trainable_variables)`. The forward pass already
    moves BatchNorm's statistics and seed generators. A snapshot taken inside a `tf.function` is valid for that call.
    With stateful RNNs or SpectralNormalization pass `scaler.state_of(model)`.

    Args:
        variables: TensorFlow or Keras variables of any dtype and shape.

    Raises:
        InvalidArgument: If `variables` is a model, or not a list of variables.
    """
    if isinstance(variables, keras.layers.Layer):
        raise InvalidArgument("snapshot(model): expected its variables: pass model.non_trainable_variables.")
    variables = tuple(as_variables("snapshot", variables))
    warn_if_late(variables)
    return Snapshot(variables, tuple(tf.identity(variable) for variable in variables))


def all_finite(variables: Sequence[Any]) -> tf.Tensor:
    """Whether every value of the floating-point variables is finite: a scalar bool."""
    values = [tf.convert_to_tensor(variable) for variable in variables]
    alike: dict[Any, list[tf.Tensor]] = {}
    for place, value in enumerate(values):
        if value.dtype.is_floating:
            # One operation looks at many scalars, such as metrics, or at many vectors, such as BatchNorm's statistics.
            small = value.shape.rank in (0, 1)
            alike.setdefault((value.dtype.name, value.shape.rank) if small else place, []).append(value)
    groups = [_together(group) if len(group) > 1 else group[0] for group in alike.values()]
    flags = [tf.reduce_all(tf.math.is_finite(group)) for group in groups]
    return flags[0] if len(flags) == 1 else tf.reduce_all([tf.constant(True), *flags])


def put_back(strategy: Any, state: Iterable[tuple[Any, Any]]) -> None:
    """Gives variables the values that they had before a step, on every replica.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        state: Pairs of a variable and its value before the step, on every replica.
    """
    for variable, value in state:
        replicas.assign_each(strategy, variable, lambda own, value: value, value)


def put_back_non_finite(strategy: Any, state: Sequence[tuple[Any, Any]], kept: tf.Tensor | None = None) -> None:
    """Puts back what is not finite any more, and everything unless `kept`: see `state_to_keep`.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        state: Pairs of a variable and its value before the step, on every replica.
        kept: Scalar bool. None for a step that is not skipped.
    """
    if kept is None:
        state = [(variable, value) for variable, value in state if replicas.native(variable).dtype.is_floating]
    variables = [variable for variable, _ in state]

    def look(before: list) -> None:
        own = list(map(replicas.own_part, variables))

        def choose(*before: tf.Tensor) -> None:
            found = state_to_keep(variables, own, before, [kept] * len(own))
            for variable, value in zip(own, found, strict=True):
                variable.assign(value)

        if kept is not None or in_xla() or has_gpu():
            choose(*before)
        else:  # Look at all of them at once: a choice for each would assign every variable in every step.
            tf.cond(all_finite(own), lambda: None, lambda: call_noninlined(choose, *before))

    if state:
        replicas.map_replicas(strategy, look, [value for _, value in state])


def state_to_keep(
    variables: Sequence[Any], own: Sequence[Any], before: Sequence[tf.Tensor], kept: Sequence[tf.Tensor | None]
) -> list[tf.Tensor]:
    """The value of each variable now, with the value before where it is not finite now, and everywhere unless `kept`.

    A moving variance can overflow in a step whose loss and gradients are finite. The mean beside it, finite and just as
    absurd, would then be divided by the variance of another batch: what a layer has of one shape goes back together,
    element by element.

    Args:
        variables: They tell by their names which belong together.
        own: The same on this replica.
        before: Their values before the step.
        kept: For each a scalar bool, or None for True.
    """
    values = list(map(tf.convert_to_tensor, own))
    kin = [_kin(variable, value) for variable, value in zip(variables, values, strict=True)]
    sound: dict[tuple, tf.Tensor] = {}
    for one, value in zip(kin, values, strict=True):
        if value.dtype.is_floating:
            finite = tf.math.is_finite(value)
            sound[one] = tf.logical_and(sound[one], finite) if one in sound else finite

    def chosen(one: tuple, value: tf.Tensor, old: tf.Tensor, keep: tf.Tensor | None) -> tf.Tensor:
        flags = [flag for flag in (keep, sound.get(one) if value.dtype.is_floating else None) if flag is not None]
        return tf.where(functools.reduce(tf.logical_and, flags), value, old) if flags else value

    return list(map(chosen, kin, values, before, kept))


def _kin(variable: Any, value: tf.Tensor) -> tuple:
    """Alike for the variables of one layer with one shape. A scalar, such as a metric's, is alone."""
    path, _, _ = replicas.native(variable).name.rpartition("/")
    return (path if path and value.shape.rank else id(variable), tuple(value.shape))


def _together(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat(values, 0) if values[0].shape.rank else tf.stack(values)
