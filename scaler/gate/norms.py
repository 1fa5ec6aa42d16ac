"""The norms of a step's gradients: those that decide and clip, and those of each gradient that only a skip asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.gate.joined import Joined
from scaler.gate.targets import Targets
from scaler.gradients.clipping import Clipping
from scaler.gradients.measurement import squared_norms


def measured(
    strategy: Any,
    targets: Targets,
    clip: Clipping | None,
    grads: Sequence,
    joined: Joined,
    loss_scale: tf.Tensor,
    selects: bool,
    by_tensor: bool,
) -> tuple[Any, tf.Tensor | None]:
    """Squared norms that add up to that of all gradients, and the squared norm of each gradient.

    Small gradients are measured together: an operation for each takes longer than the sum.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls.
        targets: What the step moves.
        clip: How unscaled gradients are limited, or None.
        grads: Scaled gradients on every replica, without duplicate indices, of any floating dtype.
        joined: The same gradients side by side.
        loss_scale: Scalar float32.
        selects: Whether the step selects its new values. It then knows why it skips by the norm of each.
        by_tensor: Whether somebody asks for the norm of each at every step.

    Returns:
        On every replica float32 or float64 [m], and that of each gradient, [n], on the first replica. None where it
        was not measured.
    """
    # A gradient that has a limit of its own needs a norm of its own.
    alike = not by_tensor and all(targets.takes_derivative) and (clip is None or clip.limits_all_alike)
    groups = joined.worth_measuring_together() if alike else []
    if not groups:
        squares = replicas.each(strategy, targets.squared_norms, grads, loss_scale, not selects)
        return squares, replicas.of_each(strategy, squares)[0]
    in_groups = {place for places in groups for place in places}
    parts = [*map(joined.at, groups), *(grad for place, grad in enumerate(grads) if place not in in_groups)]
    squares = replicas.each(strategy, squared_norms, parts, loss_scale, not selects)
    if not selects:
        return squares, None
    first = [replicas.of_each(strategy, grad)[0] for grad in grads]
    return squares, targets.squared_norms(first, loss_scale, may_branch=False)
