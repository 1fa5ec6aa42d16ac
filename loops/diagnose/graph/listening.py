"""What a step hands to its loss scaler while it is traced: the loss, then the gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

import scaler


@dataclasses.dataclass
class Heard:
    """What was handed over, in order. Of several replicas, by the first.

    Attributes:
        losses: The unscaled losses.
        gradients: The scaled gradients of each `apply` and `unscale`.
        finite: For each `apply`, scalar bool, whether it applied them; of several replicas, those of each.
        moments: For each call, whether it took a loss, and the number of operations that the graph had then.
        nonzero: For each `apply` and `unscale` a variable, to which the step assigns how many values of each gradient
            are not zero; infinities and NaN count.
    """

    losses: list[tf.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[list] = dataclasses.field(default_factory=list)
    finite: list[tf.Tensor] = dataclasses.field(default_factory=list)
    moments: list[tuple[bool, int]] = dataclasses.field(default_factory=list)
    nonzero: Sequence[tf.Variable] = ()

    def losses_finite(self) -> list[tf.Tensor]:
        """Scalar bool for each loss, but not of those in a function that was compiled by itself: none can read them."""
        here = tf.compat.v1.get_default_graph()
        return [tf.reduce_all(tf.math.is_finite(loss)) for loss in self.losses if loss.graph is here]

    def take(self, grads: list) -> None:
        """Notes gradients that were handed over."""
        if on_first_replica():
            self.moments.append((False, count_of_operations()))
            place = len(self.gradients)
            if place < len(self.nonzero) and self.nonzero[place].shape == [len(grads)]:
                self.nonzero[place].assign([_nonzero(one) for one in grads])
            self.gradients.append(grads)


def _nonzero(grad: Any) -> tf.Tensor:
    if grad is None:
        return tf.constant(0.0)
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return tf.cast(tf.math.count_nonzero(values), tf.float32)


@contextlib.contextmanager
def listening(
    scalers: Sequence[scaler.LossScaler],
    factor: tf.Variable | tf.Tensor | None = None,
    *,
    moves: bool = True,
    nonzero: Sequence[tf.Variable] = (),
) -> Iterator[Heard]:
    """Listens to the scalers' `scale`, `unscale` and `apply`.

    Args:
        scalers: Each is put back at the end as it was.
        factor: Float32 scalar, a power of two, that multiplies each loss on its way into `scale`: the gradients are
            then as large as at a loss scale of so many times the scaler's, which its strategy knows nothing of.
        moves: False has `apply` say whether the gradients are finite, and do nothing with them: most of what is traced
            for a step is its update.
        nonzero: As in `Heard`.
    """
    heard = Heard(nonzero=nonzero)
    with contextlib.ExitStack() as stack:
        for one in scalers:
            stack.enter_context(replaced(one, "scale", _scale(one.scale, heard, factor)))
            stack.enter_context(replaced(one, "apply", _apply(one, heard, moves)))
            stack.enter_context(replaced(one, "unscale", _unscale(one.unscale, heard)))
        yield heard


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object an attribute of its own in the place of its class's, and takes it away again.

    Keras's layers and TensorFlow's modules look at what is assigned to them, so neither is asked.
    """
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


def _scale(original: Callable, heard: Heard, factor: tf.Variable | tf.Tensor | None) -> Callable:
    def scale(loss: Any) -> tf.Tensor:
        if on_first_replica():
            heard.moments.append((True, count_of_operations()))
            heard.losses.append(tf.convert_to_tensor(loss))
        return original(loss if factor is None else tf.cast(loss, tf.float32) * factor)

    return scale


def _apply(one: scaler.LossScaler, heard: Heard, moves: bool) -> Callable:
    original = one.apply

    def apply(optimizer: Any, grads: Sequence, variables: Any = None, **options: Any) -> scaler.Outcome:
        grads = list(grads)
        heard.take(grads)
        outcome = original(optimizer, grads, variables, **options) if moves else _judged(one, grads)
        heard.finite.append(outcome.finite)
        return outcome

    return apply


def _judged(one: scaler.LossScaler, grads: Sequence) -> scaler.Outcome:
    finite = scaler.gradients.all_finite([grad for grad in grads if grad is not None])
    nan, nothing, no = tf.constant(float("nan")), tf.constant(-1), tf.constant(False)
    return scaler.Outcome(
        finite=finite,
        loss_scale=one.loss_scale,
        grad_norm=nan,
        cause=tf.where(finite, int(scaler.Cause.NONE), int(scaler.Cause.OVERFLOW)),
        has_nan=no,
        index=nothing,
        clipped_norm=nan,
        count=tf.constant(0),
        nearest=nothing,
        weight=nothing,
        lower_helps=no,
    )


def _unscale(original: Callable, heard: Heard) -> Callable:
    def unscale(grads: Sequence) -> list:
        grads = list(grads)
        heard.take(grads)
        return original(grads)

    return unscale


def on_first_replica() -> bool:
    """Whether this is being traced for the first replica, or for the only one."""
    context = tf.distribute.get_replica_context()
    return context is None or tf.get_static_value(context.replica_id_in_sync_group) == 0


def count_of_operations() -> int:
    """How many operations the graph that is being traced has by now; 0 in eager mode."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())
