"""What is measured of a failed step: which step and share it is, its tensors, and the loss scale at which it passes.

A share of the batch is tried alone by giving it to every replica: the mean over the replicas is then that of the share.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempt, Attempts
from loops.diagnose.explain.explanation import Magnitude
from loops.diagnose.graph.origin import Frame, Part, magnitude, octaves_over, operation_in_float32, origins
from loops.diagnose.graph.scan import Scan, scan
from loops.step.train_step import TrainStep


def was_skipped(moment: Any) -> bool:
    """Whether the run's log says that the step was skipped."""
    logged = moment.logged or {}
    return bool(logged.get("attempted", True)) and logged.get("applied") is False


def failing(attempts: Attempts) -> tuple[int, Attempt]:
    """The failed step and its attempt: this step, or an earlier micro-batch that spoiled the window of this one."""
    moment, attempt = attempts.moment, attempts.as_run()
    if was_skipped(moment) and (attempt.applied or attempts.depends_on_graph(attempt)):
        # TensorFlow regroups products depending on the whole graph, and the graph of the run was another one.
        attempts.literal = True
        attempt = attempts.as_run()
        attempts.literal = not attempt.applied
    if attempts.windowed and attempt.applied and was_skipped(moment):
        for back, batch in enumerate(reversed(moment.before[1 - moment.train_step.accumulate :]), 1):
            earlier = attempts.as_run(batch)
            if not earlier.applied:
                moment.batch = batch
                return moment.step - back, earlier
    return moment.step, attempt


def at_share_to_blame(attempts: Attempts, attempt: Attempt) -> tuple[tuple[int, ...], Attempt]:
    """Finds the shares of the batch that make the step fail alone, and gives the first of them to every replica.

    Args:
        attempts: The attempts on several replicas. The batches of their moment are replaced by that share.
        attempt: The attempt with the whole batch.

    Returns:
        The replicas whose shares fail alone, and the attempt with the first share; without any, the given attempt.
    """
    moment = attempts.moment

    def repeated(batch: Any, replica: int) -> Any:
        def part(tensor: tf.Tensor) -> tf.Tensor:
            own = len(tensor) // moment.replicas
            return tf.concat([tensor[replica * own : (replica + 1) * own]] * moment.replicas, axis=0)

        return tf.nest.map_structure(part, batch)

    alone = [attempts.as_run(repeated(moment.batch, replica)) for replica in range(moment.replicas)]
    failed = tuple(replica for replica, one in enumerate(alone) if not one.finite)
    # One share may cause a NaN while the scale is too high for every share: those with the step's own cause count.
    bad = tuple(replica for replica in failed if alone[replica].cause is attempt.cause) or failed
    if not bad:
        return (), attempt
    moment.batch = repeated(moment.batch, bad[0])
    if moment.next_batch is not None:
        moment.next_batch = repeated(moment.next_batch, bad[0])
    return bad, alone[bad[0]]


def in_whole_batch(example: int | None, replicas: tuple[int, ...] | None, moment: Any) -> int | None:
    """The position in the whole batch of an example in the share of the first of these replicas.

    Args:
        example: The position in the share, or None.
        replicas: The replicas whose shares fail, from `at_share_to_blame`; None on one device.
        moment: The run just before the step, whose batch is that share, repeated for every replica.
    """
    if example is None or not replicas:
        return example
    return example + replicas[0] * (len(tf.nest.flatten(moment.batch)[0]) // moment.replicas)


def scan_step(attempts: Attempts) -> Scan:
    """Scans the step without XLA, and restores the run."""
    step = attempts.moment.train_step
    plain = step.retraced(jit_compile=False) if isinstance(step, TrainStep) else contextlib.nullcontext()
    with attempts.as_it_was(), plain:
        return scan(
            attempts.take_inlined,
            attempts.moment.batch,
            attempts.layers,
            attempts.scalers,
            factor=attempts.scanned_at,
        )


def octaves_beyond(seen: Scan, first: Frame) -> float | None:
    """log2 of the magnitude that a tensor would have in float32, over the largest of its format; None if it fits."""
    wide = None
    if first.source is None:
        wide = operation_in_float32(seen.operations[first.name], int(first.name.rpartition(":")[2]), seen.values)
    return octaves_over(first, math.nan if wide is None else magnitude(wide)[0])


def magnitudes(attempts: Attempts, seen: Scan) -> tuple[Magnitude, ...]:
    """The largest magnitudes in each layer, in the order of the forward pass."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for frame in seen.frames.values():
        if frame.layer is None or frame.source is not None or frame.kind == "Const" or frame.penalty:
            continue
        amax = math.nan if frame.has_nan else frame.amax
        if frame.part is Part.FORWARD:
            # The last tensor of a layer is its output.
            forward[frame.layer] = amax
        elif frame.part is Part.BACKWARD:
            backward[frame.layer] = max(amax, backward.get(frame.layer, 0.0))
    return tuple(
        Magnitude(path, forward.get(path), backward.get(path), attempts.layers[path].compute_dtype)
        for path in seen.order
        if path in attempts.layers and (path in forward or path in backward)
    )


def same_as_unobserved(attempt: Attempt, seen: Scan) -> bool:
    """Whether the scanned step was finite exactly if the unobserved step was."""
    loss = all(seen.frames[name].finite for name in seen.losses if name in seen.frames)
    if "loss" in attempt.outputs and seen.losses and loss != math.isfinite(attempt.loss):
        return False
    given = [name for names in seen.gradients for name in names if name is not None]
    observed = loss and all(seen.frames[name].finite for name in given if name in seen.frames)
    of_finite = (scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE, scaler.Cause.SPIKE)
    return observed == attempt.finite or attempt.cause in of_finite


_SMALLEST_SCALE = -14
"""log2 of a scale at which a float16 backward pass can hardly overflow."""


def fitting_scales(attempts: Attempts) -> list[tuple[float, float | None]]:
    """For each scaler whose gradients are not finite its loss scale, and the largest that fits its own gradients.

    A scale that fits is a power of two below the scaler's own at which its gradients are finite; None if there is none.
    It is a smaller one if there is no time to look for the largest.
    """
    if len(attempts.guilty) < 2:
        own = attempts.loss_scale
        return [] if not own else [(own, _largest(attempts, own, lambda factor: attempts.take_at(factor).applied))]
    found = []
    with attempts.deciding() as decided:
        for one in attempts.guilty:
            loss_scale = float(one.loss_scale)

            def finite(factor: float, one: scaler.LossScaler = one) -> bool:
                return all(passed for owner, passed in decided(factor) if owner is one)

            found.append((loss_scale, _largest(attempts, loss_scale, finite)))
    return found


def _largest(attempts: Attempts, loss_scale: float, finite: Callable[[float], bool]) -> float | None:
    """The largest power of two below a loss scale at which a step is finite, as `finite` says of a factor; or None."""
    low, high = _start(loss_scale, finite), math.ceil(math.log2(loss_scale))
    if low is None:
        return None
    while high - low > 1 and attempts.in_time():
        middle = (low + high) // 2
        low, high = (middle, high) if finite(2.0**middle / loss_scale) else (low, middle)
    return 2.0**low


def passes_at_none(attempts: Attempts) -> bool:
    """Whether a step that failed is finite neither at a loss scale of 1 nor at the smallest one."""
    scale = attempts.loss_scale
    return scale is not None and _start(scale, lambda factor: attempts.take_at(factor).applied) is None


def _start(loss_scale: float, finite: Callable[[float], bool]) -> int | None:
    """log2 of a lower scale at which the step's gradients are finite, or None."""
    starts = (min(0, math.ceil(math.log2(loss_scale)) - 1), _SMALLEST_SCALE)
    return next((start for start in starts if finite(2.0**start / loss_scale)), None)


_OPAQUE = ("While", "StatelessWhile", "If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
"""Operations that call functions, and cannot be computed alone in float32."""


def flushes(attempts: Attempts, fits_at: float) -> bool:
    """Whether a step is finite at a scale only because gradients that are finite at no scale become zero there.

    Args:
        attempts: The attempts at the step.
        fits_at: The largest scale at which the step is finite, lower than its own.
    """
    loss_scale = attempts.loss_scale or 1.0
    here, there = (attempts.take_at(scale / loss_scale).nonzero for scale in (loss_scale, fits_at))
    if here is None or there is None or not here.any():
        return False
    if not there.any():
        return True
    lost = (here > 0) & (there == 0)
    return (fits_at < 1.0 or bool(lost.any())) and not _overflows(attempts, 2.0 * fits_at / loss_scale)


def _overflows(attempts: Attempts, factor: float) -> bool:
    """Whether the first non-finite tensor, at the lowest scale that fails, would be finite in a wider format."""
    attempts.scanned_at = factor
    try:
        seen = scan_step(attempts)
        first = next(iter(origins(seen.frames, seen.failed)), None)
        return first is None or first.kind in _OPAQUE or octaves_beyond(seen, first) is not None
    finally:
        attempts.scanned_at = None
