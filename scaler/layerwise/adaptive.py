"""The loss scale of a layer, chosen from how its gradients are spread."""

from __future__ import annotations

import dataclasses
import statistics
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaler.backend.formats import float_format
from scaler.checks import as_float, check_bounds, check_count, check_number
from scaler.errors import InvalidArgument
from scaler.strategies import exact
from scaler.strategies.base import amax_of, bounded


class LayerEvent(NamedTuple):
    """What one attempted step showed of each group of layers, to a strategy in a `Layerwise`. All of shape [groups].

    Attributes:
        finite: Bool, whether no gradient that the group's scale is responsible for overflowed: those that enter it,
            once rescaled, those that leave it, and those of its weights.
        amax: Float32, the largest magnitude of these gradients, *unscaled*: infinity if one is not finite.
        deviation: Float32, the root mean square of the *unscaled* gradients: of those that enter, of those that leave,
            or of those of all its weights, whichever is least. 0 where one of them is zero altogether.
        entering: Float32, the largest magnitude of the *unscaled* gradients that enter it: known also where the group
            itself overflows.
        observed: Bool, whether finite gradients that are not all zero entered the group. If not, nothing is known about
            the group, and its state does not change.
        loss_finite: Bool, whether the scaled loss was finite, alike for all groups. If not, and any group overflowed,
            the step was skipped because of its loss, and no state changes.
    """

    finite: tf.Tensor
    amax: tf.Tensor
    deviation: tf.Tensor
    entering: tf.Tensor
    observed: tf.Tensor
    loss_finite: tf.Tensor | bool = True


class AdaptiveScaleState(NamedTuple):
    """State of `AdaptiveScale`.

    Attributes:
        loss_scale: Float32, in [min_scale, max_scale], a power of two if these are.
        ceiling: Float32: no scale above it is chosen, since something overflowed there.
        good_steps: Int32, finite steps since the ceiling moved.
    """

    loss_scale: tf.Tensor
    ceiling: tf.Tensor
    good_steps: tf.Tensor


@dataclasses.dataclass(frozen=True)
class AdaptiveScale:
    """The least power of two that keeps a layer's gradients from underflow: the rule of `Layerwise` (Zhao et al.).

        s_low = u_min / (sqrt(2) * erfinv(underflow) * deviation)
        s_up  = u_max / (2^headroom * amax)
        finite:      scale = 2^floor(log2(min(max(s_low, 1), s_up, ceiling)))
                     good += 1; when good >= growth_interval: ceiling = min(2 * ceiling, max_scale); good = 0
        non-finite:  ceiling = scale / 2; good = 0
                     scale = 2^floor(log2(min(scale / 2, u_max / (2^headroom * entering))))
        always:      scale and ceiling in [min_scale, max_scale]

    If gradients are normally distributed around 0, the share `underflow` of them is smaller than u_min after scaling by
    s_low. u_min and u_max are the least and the greatest positive number of the format.

    The paper chooses a layer's scale before its backward pass, so it predicts the deviation of the product from the
    means and deviations of gradient and weights, and divides u_max by the layer's fan-in since the sum is not known
    yet. Here the scale is that of the next step, so the product itself was measured, at both ends of the group and in
    its weights; `headroom` is for how much it may grow from one step to the next. The paper's max(s_low, 1) holds for
    what a layer adds to the scale that its gradients bring along; here it holds for the whole scale, so that groups
    stay apart. Its code's bounds of 16 a layer and 1024 in all are `max_scale` here. The
    ceiling is ours: it keeps a scale from coming back at once to where it overflowed.

    Args:
        initial_scale: Before the first step, in [min_scale, max_scale].
        underflow: The share of gradients that may underflow, in (0, 1).
        headroom: Octaves between the largest gradient of a step and the greatest number of the format.
        growth_interval: Finite steps after an overflow until the scale may be twice as large again.
        format: Of the gradients, as `float_format` takes it.
        min_scale: Floor, at least 2^-60.
        max_scale: Ceiling, at most 2^60.

    Raises:
        InvalidArgument: For a value outside the ranges above; in `update` for an event that is not a `LayerEvent`.

    References:
        Zhao, Vogel, Ahmed, Luk 2020, Reducing Underflow in Mixed Precision Training by Gradient Scaling; 2019 as
        Adaptive Loss Scaling for Mixed Precision Training (https://arxiv.org/abs/1910.12385);
        kumasento/gradient-scaling, ada_loss/chainer_impl/ada_loss_chainer.py (get_loss_scale_by_approx_range).
    """

    initial_scale: float = 1.0
    _: dataclasses.KW_ONLY
    underflow: float = 1e-3
    headroom: int = 4
    growth_interval: int = 1000
    format: str = "float16"
    min_scale: float = 2.0**-60
    max_scale: float = 2.0**60
    int64_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        check_number("underflow", self.underflow, "a number in (0, 1)", lambda v: 0 < v < 1)
        check_count("headroom", self.headroom, 4)
        check_count("growth_interval", self.growth_interval, 1000)
        float_format(self.format)

    def init(self) -> AdaptiveScaleState:
        """The state before the first step."""
        return AdaptiveScaleState(as_float(self.initial_scale), as_float(self.max_scale), tf.constant(0))

    def update(self, state: AdaptiveScaleState, event: LayerEvent) -> AdaptiveScaleState:
        """The state after a step that was attempted with `state` and showed `event`."""
        if getattr(event, "deviation", None) is None:
            raise InvalidArgument(
                "AdaptiveScale.update: the event has no deviation. It is a rule for groups of layers: give it to "
                "hs.layerwise.Layerwise and not to a LossScaler."
            )
        finite, amax = amax_of(self, event)  # type: ignore[arg-type]
        halved = bounded(self, state.loss_scale / 2.0)
        lowered = bounded(self, exact.power_of_two_at_most(tf.minimum(halved, self._allowed(event.entering))))
        good = tf.clip_by_value(state.good_steps, 0, self.growth_interval - 1) + 1
        recovered = good >= self.growth_interval
        raised = tf.where(recovered, tf.minimum(state.ceiling * 2.0, as_float(self.max_scale)), state.ceiling)
        fitting = tf.minimum(self._needed(event.deviation), self._allowed(amax))
        # Floored last: the ceiling is a power of two only if the bounds are.
        followed = bounded(self, exact.power_of_two_at_most(tf.minimum(fitting, state.ceiling)))
        return AdaptiveScaleState(
            loss_scale=tf.where(finite, tf.where(amax > 0.0, followed, state.loss_scale), lowered),
            ceiling=bounded(self, tf.where(finite, raised, halved)),
            good_steps=tf.where(tf.logical_and(finite, tf.logical_not(recovered)), good, tf.zeros_like(good)),
        )

    def _needed(self, deviation: tf.Tensor) -> tf.Tensor:
        quantile = statistics.NormalDist().inv_cdf((1.0 + float(self.underflow)) / 2.0)  # sqrt(2) * erfinv(underflow)
        least = tf.maximum(deviation, _TINY)
        return tf.maximum(float_format(self.format).smallest_subnormal / quantile / least, 1.0)

    def _allowed(self, amax: tf.Tensor) -> tf.Tensor:
        largest = float_format(self.format).max / 2.0**self.headroom
        return as_float(min(largest, 2.0**100)) / tf.clip_by_value(amax, _TINY, 1 / _TINY)


_TINY = 2.0**-100
"""Beyond what any scale can lift: it keeps quotients finite."""
