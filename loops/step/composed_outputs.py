"""What a `ComposedStep` returns: the scalars of each part, by its name, and what all of them did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

import scaler
from loops.step.part_group import Decided, Retried
from loops.step.parts import Part
from loops.step.turns import Taken, nothing

OWN = (
    *("loss", "attempted", "applied", "loss_scale", "grad_norm", "clipped_norm"),
    *("norm_limit", "loss_limit", "clipped_tensors", "retries"),
)
"""What a part returns in any case, with a `scaler.SpikeGuard` or `retry`; its loss function may add others."""
Scales = Mapping[str, Mapping[str, tf.Tensor]]


def scales_of(scalers: Mapping[str, scaler.LossScaler], retry: bool) -> Scales:
    """What the outputs tell of each scaler as it is before a decision, and before a retry."""
    retries = {"retries": tf.constant(0, tf.int64)} if retry else {}
    limits = scaler.authoring.spike_limits
    return {name: {"loss_scale": one.loss_scale, **limits(one), **retries} for name, one in scalers.items()}


def outputs_of(
    parts: Sequence[Part],
    taken: Sequence[Taken | None],
    decided: Decided | None,
    retried: Retried | None,
    scales: Scales,
    extra: Mapping[str, Mapping[str, tf.DType]],
) -> dict[str, tf.Tensor]:
    """The outputs of some parts, named as "generator/loss".

    Args:
        parts: About which one scaler decided.
        taken: The pass of each; None if it was not its turn.
        decided: What was decided; None if it was not their turn.
        retried: Their gradients after a retry; None if there was none to make.
        scales: From `scales_of`.
        extra: For each part the dtypes of what its loss function adds.
    """
    outputs: dict[str, tf.Tensor] = {}
    no, nan = tf.constant(False), tf.constant(float("nan"))
    for place, (part, one) in enumerate(zip(parts, taken, strict=True)):
        outcome = None if decided is None else decided.outcomes[place]
        added = extra[part.name].items()
        own = {
            "loss": nan if one is None else one.loss,
            "attempted": no if decided is None else decided.attempted,
            "applied": no if outcome is None else outcome.finite,
            "grad_norm": nan if outcome is None else outcome.grad_norm,
            "clipped_norm": nan if outcome is None else outcome.clipped_norm,
            **scales[part.name],
            **_clipped(part, outcome),
            **_retried(retried),
            **{name: nothing(dtype) if one is None else one.extra[name] for name, dtype in added},
        }
        outputs |= {f"{part.name}/{name}": value for name, value in own.items()}
    return outputs


def _clipped(part: Part, outcome: scaler.Outcome | None) -> dict[str, tf.Tensor]:
    """How many gradients a part's guard has clipped, if it has one that clips."""
    if part.loss_scaler is None or getattr(part.loss_scaler.strategy, "by_tensor", None) != "clip":
        return {}
    return {"clipped_tensors": tf.constant(0, tf.int64) if outcome is None else outcome.clipped_tensors}


def _retried(retried: Retried | None) -> dict[str, tf.Tensor]:
    return {} if retried is None else {"loss_scale": retried.loss_scale, "retries": retried.retries}


def summed_up(found: Sequence[tuple[int, Decided]]) -> dict[str, tf.Tensor]:
    """What all parts did, and the first skip of them.

    Args:
        found: Where the weights of some parts begin among all, and what was decided about them.
    """
    attempted, applied = tf.constant(False), tf.constant(True)
    cause, variable = tf.constant(int(scaler.Cause.NONE), tf.int64), tf.constant(-1, tf.int64)
    for start, one in reversed(found):
        skipped = tf.logical_and(one.attempted, tf.logical_not(one.applied))
        attempted = tf.logical_or(attempted, one.attempted)
        applied = tf.logical_and(applied, tf.logical_not(skipped))
        cause = tf.where(skipped, one.cause, cause)
        variable = tf.where(skipped, tf.where(one.variable < 0, one.variable, one.variable + start), variable)
    applied = tf.logical_and(attempted, applied)
    return {"attempted": attempted, "applied": applied, "cause": cause, "variable": variable}
