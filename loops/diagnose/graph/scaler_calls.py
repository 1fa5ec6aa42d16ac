"""Records the losses and gradients that a step passes to its loss scalers while it is traced."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import count_of_operations, on_first_replica
from loops.diagnose.graph.changes import patched


@dataclasses.dataclass
class ScalerCalls:
    """The recorded tensors, in the order of the calls. Of several replicas, the first one is recorded.

    Attributes:
        losses: The unscaled losses.
        gradients: The scaled gradients of each `apply` and `unscale`.
        applied: The scaled gradients of each `apply` alone, None in the place of a variable's new value.
        finite: For each `apply` a scalar bool, whether it applied the gradients; on several replicas, one from each.
        owners: For each of these the scaler.
        moments: For each call, whether it took a loss, and the number of operations in the graph at that time.
        nonzero: For each `apply` and `unscale` a float32 variable, one element for each gradient. The step assigns to
            it how many values of the gradient are not zero; infinities and NaN count, a variable's new value does not.
    """

    losses: list[tf.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[list] = dataclasses.field(default_factory=list)
    applied: list[list] = dataclasses.field(default_factory=list)
    finite: list[tf.Tensor] = dataclasses.field(default_factory=list)
    owners: list[scaler.LossScaler] = dataclasses.field(default_factory=list)
    moments: list[tuple[bool, int]] = dataclasses.field(default_factory=list)
    nonzero: Sequence[tf.Variable] = ()

    def losses_finite(self) -> list[tf.Tensor]:
        """A scalar bool for each loss, except for those inside an inner `tf.function`, which cannot be read."""
        here = tf.compat.v1.get_default_graph()
        return [tf.reduce_all(tf.math.is_finite(loss)) for loss in self.losses if loss.graph is here]

    def take(self, grads: list, derivatives: list) -> None:
        """Records gradients that were passed to a scaler, and those of them that are no new values."""
        if on_first_replica():
            self.moments.append((False, count_of_operations()))
            place = len(self.gradients)
            if place < len(self.nonzero) and self.nonzero[place].shape == [len(grads)]:
                self.nonzero[place].assign([_nonzero(one) for one in derivatives])
            self.gradients.append(grads)


def _nonzero(grad: Any) -> tf.Tensor:
    if grad is None:
        return tf.constant(0.0)
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return tf.cast(tf.math.count_nonzero(values), tf.float32)


@contextlib.contextmanager
def recording_scaler_calls(
    scalers: Sequence[scaler.LossScaler],
    factor: tf.Variable | tf.Tensor | None = None,
    *,
    moves: bool = True,
    nonzero: Sequence[tf.Variable] = (),
) -> Iterator[ScalerCalls]:
    """Records the calls of the scalers' `scale`, `unscale` and `apply`.

    Args:
        scalers: The scalers of the step. Each is restored at the end.
        factor: Float32 scalar, a power of two, that multiplies each loss on its way into `scale`. It scales the
            gradients as a loss scale multiplied by it would, while the strategy's state stays the same.
        moves: Whether `apply` updates the weights. If False it only checks whether the gradients are finite, which
            makes tracing much faster: most of a step's graph is its update.
        nonzero: The variables that count non-zero values, see `ScalerCalls`.
    """
    calls = ScalerCalls(nonzero=nonzero)
    with contextlib.ExitStack() as stack:
        for one in scalers:
            stack.enter_context(patched(one, "scale", _scale(one.scale, calls, factor)))
            stack.enter_context(scaler.authoring.apply_replaced(one, _apply_shares(one, calls, moves)))
            stack.enter_context(patched(one, "unscale", _unscale(one.unscale, calls)))
        yield calls


def _scale(original: Callable, calls: ScalerCalls, factor: tf.Variable | tf.Tensor | None) -> Callable:
    def scale(loss: Any) -> tf.Tensor:
        if on_first_replica():
            calls.moments.append((True, count_of_operations()))
            calls.losses.append(tf.convert_to_tensor(loss))
        return original(loss if factor is None else tf.cast(loss, tf.float32) * factor)

    return scale


def _apply_shares(one: scaler.LossScaler, calls: ScalerCalls, moves: bool) -> Callable:
    def apply_shares(
        original: Callable, shares: Sequence[scaler.Share], **options: Any
    ) -> tuple[scaler.Outcome, list[scaler.Outcome]]:
        # Of a step that would take its gradients again the first ones are explained.
        options.pop("again", None)
        grads = [grad for share in shares for grad in share.grads]
        derivatives = _derivatives(grads, [weight for share in shares for weight in share.weights])
        calls.take(grads, derivatives)
        if moves:
            outcome, outcomes = original(shares, **options)
        else:
            outcome = _outcome_of_gradients(one, grads)
            outcomes = [outcome] * len(shares)
        calls.applied.append(derivatives)
        calls.finite.append(outcome.finite)
        calls.owners.append(one)
        return outcome, outcomes

    return apply_shares


def _outcome_of_gradients(one: scaler.LossScaler, grads: Sequence) -> scaler.Outcome:
    finite = scaler.gradients.all_finite([grad for grad in grads if grad is not None])
    nan, nothing, no = tf.constant(float("nan")), tf.constant(-1, tf.int64), tf.constant(False)
    outcome = scaler.Outcome(
        finite=finite,
        loss_scale=one.loss_scale,
        grad_norm=nan,
        cause=tf.cast(tf.where(finite, int(scaler.Cause.NONE), int(scaler.Cause.OVERFLOW)), tf.int64),
        has_nan=no,
        index=nothing,
        clipped_norm=nan,
        count=tf.constant(0, tf.int64),
        nearest=nothing,
        lower_helps=no,
    )
    # A step may return any field, and replicas put tensors together.
    return scaler.Outcome(
        *(tf.constant(one, tf.int64) if type(one) is int else tf.convert_to_tensor(one) for one in outcome)
    )


def _unscale(original: Callable, calls: ScalerCalls) -> Callable:
    def unscale(grads: Sequence, variables: Any = None) -> list:
        grads = list(grads)
        calls.take(grads, _derivatives(grads, variables))
        return original(grads, variables)

    return unscale


def _derivatives(grads: list, variables: Any) -> list:
    """The gradients without new values; all where the variables are not known, or do not fit, which is refused."""
    known = variables.weights if isinstance(variables, scaler.MasterWeights) else variables
    fit = isinstance(known, Sequence) and len(known) == len(grads)
    return scaler.gradients.derivatives(grads, known) if fit else grads
