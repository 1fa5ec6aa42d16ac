"""The loss scale that the largest gradients of the last steps allow."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.formats import float_format
from scaler.checks import check_bounds, check_constant, check_count, check_flag, is_symbolic
from scaler.errors import InvalidArgument
from scaler.strategies import exact
from scaler.strategies.base import Event, Needs, amax_of, bounded, first_scale

_ALGORITHMS = ("max", "most_recent")


class DelayedAmaxState(NamedTuple):
    """State of `DelayedAmax`.

    Attributes:
        loss_scale: Scalar float32, in [min_scale, max_scale].
        history: Float32 [history_length], amax of the last steps, the newest last; 0 where there was none yet.
    """

    loss_scale: tf.Tensor
    history: tf.Tensor


@dataclasses.dataclass(frozen=True)
class DelayedAmax:
    """Scale the largest magnitude of the last steps to the format's maximum (FP8 delayed scaling).

        history:     drop the oldest, append amax             amax of the unscaled gradients
        largest:     max(history), or the newest
        scale:       (format_max / largest) / 2^margin, down to a power of two, within the bounds;
                     as it was while largest = 0
        non-finite:  append 2 * format_max / (scale * 2^margin): the scale is halved, for as long as this is remembered

    The original scales single tensors before a cast that saturates, and ignores an amax that is not finite. Behind a
    loss scale an overflow is information: at this scale something was larger than the format. That is what a
    non-finite step appends. Unrounded, as in the original, with power_of_two=False.

    It sees the gradients of the *weights* only. In float16 those of activations overflow first: give it a margin.

    Args:
        initial_scale: Loss scale until the first observation, in [min_scale, max_scale].
        format: Whose maximum to scale to, as `float_format` takes it: "float16", "float8_e5m2", "float8_e4m3fn", ...
        margin: Octaves of distance from the maximum, a whole number in [0, 64].
        history_length: Steps remembered, at least 1.
        algorithm: "max" of the history, or "most_recent".
        power_of_two: Whether the scale is rounded down to a power of two, so that scaling is exact.
        min_scale: Floor, at least 2^-126.
        max_scale: Ceiling, at most 2^126.

    The bounds may also be scalar tensors or variables, which are not checked.

    Raises:
        InvalidArgument: For a value outside the ranges above; in `update` for an event without amax.

    References:
        Micikevicius et al. 2022, FP8 Formats for Deep Learning (https://arxiv.org/abs/2209.05433); defaults and formula
        from NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py (DelayedScaling) and
        transformer_engine/pytorch/quantization.py. The power of two is that of Azure/MS-AMP,
        msamp/common/tensor/meta.py.
    """

    initial_scale: float = 1.0
    _: dataclasses.KW_ONLY
    format: str = "float16"
    margin: int = 0
    history_length: int = 1024
    algorithm: str = "max"
    power_of_two: bool = True
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**40
    needs: ClassVar[Needs] = Needs(amax=True)
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        float_format(self.format)
        check_constant("margin", self.margin, "whole octaves in [0, 64]", lambda v: 0 <= v <= 64 and v == int(v))
        check_count("history_length", self.history_length, 1024)
        if is_symbolic(self.history_length) or is_symbolic(self.power_of_two):
            raise InvalidArgument("history_length and power_of_two: expected Python values and not tensors.")
        if self.algorithm not in _ALGORITHMS:
            raise InvalidArgument(f"algorithm={self.algorithm!r}: expected one of {', '.join(_ALGORITHMS)}.")
        check_flag("power_of_two", self.power_of_two)

    def init(self) -> DelayedAmaxState:
        """The state before the first step."""
        return DelayedAmaxState(first_scale(self), tf.zeros([self.history_length]))

    @no_autograph
    def update(self, state: DelayedAmaxState, event: Event) -> DelayedAmaxState:
        """The state after a step that was attempted with `state` and showed `event`."""
        finite, amax = amax_of(self, event)
        limit, margin = tf.constant(float_format(self.format).max, tf.float32), 2.0 ** -int(self.margin)
        # Kernels disagree on subnormal numbers, and the largest float32 is its own double.
        exceeded = tf.minimum((limit / state.loss_scale) * (2.0 * margin), 2.0**127)
        seen = tf.where(finite, tf.where(exact.power_of_two_at_most(amax) > 0.0, amax, 0.0), exceeded)
        history = tf.concat([state.history[1:], seen[tf.newaxis]], axis=0)
        largest = tf.reduce_max(history, axis=0) if self.algorithm == "max" else seen
        scale = (limit / tf.where(largest > 0.0, largest, 1.0)) * margin
        if self.power_of_two:
            scale = exact.power_of_two_at_most(scale)
        scale = tf.where(finite, scale, tf.minimum(scale, state.loss_scale))
        return DelayedAmaxState(bounded(self, tf.where(largest > 0.0, scale, state.loss_scale)), history)
