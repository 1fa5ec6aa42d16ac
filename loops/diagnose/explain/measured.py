"""What is measured of a failed step, and around it: its tensors, the loss scale that fits, weights that grew, literals.

A share of the batch is tried alone by giving it to every replica: the mean over the replicas is then that of the share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempt, Attempts, Held, held, size_of_update
from loops.diagnose.explain.case import Case
from loops.diagnose.explain.explanation import Explanation, Growth, Magnitude
from loops.diagnose.graph.calls import BACKWARD, recording_scaler_calls
from loops.diagnose.graph.changes import in_policy
from loops.diagnose.graph.literals import Literal, lost_literals
from loops.diagnose.graph.models import models_in_step, weights_in_step
from loops.diagnose.graph.origin import Frame, Part, magnitude, octaves_over, operation_in_float32, origins
from loops.diagnose.graph.scan import Scan, scan


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
    with attempts.scanning():
        return scan(
            attempts.take_inlined, attempts.moment.batch, attempts.layers, attempts.scalers, attempts.scanned_at
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
    for one in attempts.guilty:

        def finite(factor: float, one: scaler.LossScaler = one) -> bool:
            return all(passed for owner, passed in attempts.take_at(factor).decided if owner is one)

        own = float(one.loss_scale)
        found.append((own, _largest(attempts, own, finite)))
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


_LARGE = 100.0
"""Weights of networks seldom have such magnitudes."""


def growth_of(known: Explanation, attempts: Attempts) -> Growth | None:
    """What speaks for an update that was too large, if nothing helps and the data are not at fault.

    It is the last update, if that was larger than the weights; where it is unknown the weights, if they are large.
    """
    told = known.where == "data" or known.empty or known.label or known.lost_weight
    if told or any(one.helps for one in known.remedies):
        return None
    rate = Case(attempts).rate
    if known.verdict == "update":
        return None if rate is None else Growth(None, None, rate, None)
    found = _last_update(attempts)
    if found is not None:
        return found if found.moved is not None and found.moved > 1.0 else None
    size = largest(held(weights_in_step(attempts.moment.train_step, attempts.part)))
    return None if size <= _LARGE else Growth(None, None, rate, size)


def _last_update(attempts: Attempts) -> Growth | None:
    """The last update, measured by repeating the steps from it on; None if it lies before those that can be."""
    moment = attempts.moment
    applied = f"{attempts.part}/applied" if attempts.part else "applied"
    last = max((row["step"] for row in moment.rows if row["step"] < moment.step and row.get(applied)), default=0)
    if last <= moment.began_at:
        return None
    weights = weights_in_step(moment.train_step, attempts.part)
    seen: list[tuple[Held, float | None]] = []
    try:
        moment.from_checkpoint(lambda loop: seen.append((held(weights), Case(attempts).rate)), moment.step - last)
    except (scaler.ScalerError, tf.errors.OpError):
        return None
    (before, rate), *_ = seen
    return Growth(last, size_of_update(before), rate, largest(held(weights)))


def largest(before: Held) -> float:
    """The largest magnitude among the values, NaN if one is; 0 without values."""
    return float(np.max([np.max(np.abs(value)) for _, value in before if value.size], initial=0.0))


def lost_weight(attempts: Attempts) -> tuple[str, int] | None:
    """The first weight that held a NaN or an infinity already where the replay began, and after how many steps."""
    moment = attempts.moment
    weights = [one for model in models_in_step(moment.train_step) for one in model.variables] + attempts.own_variables
    with moment.at_checkpoint():
        found = [one for one, (_, value) in zip(weights, held(weights), strict=True) if not np.isfinite(value).all()]
    return (getattr(found[0], "path", found[0].name), moment.began_at) if found else None


def as_spike(known: Explanation, attempts: Attempts, attempt: Attempt) -> Explanation:
    """The explanation of a spike, with its number and the limit."""
    known = dataclasses.replace(known, verdict="spike", applied=False)
    if any(getattr(one.strategy, "by_tensor", None) for one in attempts.scalers):
        # No log has the limits of each gradient, nor the norm of those that were clipped to theirs.
        return dataclasses.replace(known, said=said_by_scaler(attempts, scaler.Cause.SPIKE))
    return dataclasses.replace(known, spike=_spike(attempts.moment.logged or {}) or _spike(attempt.outputs))


def _spike(outputs: Mapping) -> tuple[str, float, float] | None:
    """Which number of a step is above its limit, the number and the limit; None if the outputs do not tell."""
    for name, output in (("norm", "grad_norm"), ("loss", "loss")):
        value, limit = outputs.get(output), outputs.get(f"{name}_limit")
        if value is not None and limit is not None and float(value) > float(limit):
            return name, float(value), float(limit)
    return None


_BEGINNING = "The step was skipped because "


def said_by_scaler(attempts: Attempts, cause: scaler.Cause) -> str | None:
    """Repeats the step with its update, and returns what its scaler says of it as a clause.

    Args:
        attempts: At the step.
        cause: Why it was skipped.

    Returns:
        Such as "in part 'critic', the learning rate of SGD is NaN ..."; None if no scaler tells.
    """
    if attempts.moment.alone:
        return None  # Other workers would have to take part.
    scalers = getattr(attempts.moment.train_step, "scalers", {})
    with attempts.as_it_was():
        attempts.moment.loop.calls.one(attempts.moment.batch)
        for one in attempts.scalers:
            skipped = int(one.counters.consecutive_skips) and int(one.last_skip.cause) == cause
            said = one.explain() if skipped else ""
            if said.startswith(_BEGINNING):
                own = [name for name, each in scalers.items() if each is one] if len(scalers) > 1 else []
                part = f"in part {own[0]!r}, " if len(own) == 1 else ""
                return part + said.removeprefix(_BEGINNING)
    return None


_OCTAVES = (8, 16, 24, 32, 40)
"""The scale is raised by so many, until the step is no longer finite."""
_MOST = 2.0**126
"""The largest loss scale that there is."""


def with_zero_gradients(known: Explanation, attempts: Attempts, attempt: Attempt) -> Explanation:
    """The explanation of an applied step, with the verdict "zero" if its gradients are and its loss is not."""
    lost = attempt.outputs.get("grad_norm") == 0 and attempt.loss != 0 and math.isfinite(attempt.loss)
    if not lost:
        return known
    known = dataclasses.replace(known, verdict="zero", nonzero=_count(attempts.take_at(1.0)))
    if known.nonzero:
        return known
    for octaves in _OCTAVES:
        scale = (known.loss_scale or 1.0) * 2.0**octaves
        raised = attempts.take_at(2.0**octaves)
        if not raised.finite or scale > _MOST:
            break
        if _count(raised) > (known.nonzero or 0):
            known = dataclasses.replace(known, nonzero=_count(raised), nonzero_at=scale)
    return known


def _count(attempt: Attempt) -> int:
    return 0 if attempt.nonzero is None else int(attempt.nonzero.sum())


def literals_of(attempts: Attempts, path: str, seen: Scan) -> tuple[Literal, ...]:
    """The literals of a layer, each once: its constants in the scan, compared with those of a trace in float32."""
    narrow = [layer for layer in attempts.layers.values() if layer.compute_dtype == "float16"]
    inside = [frame for frame in seen.frames.values() if frame.layer == path and not frame.name.startswith(BACKWARD)]
    if not narrow or not inside:
        return ()
    try:
        with attempts.scanning(), in_policy(narrow, "float32"), recording_scaler_calls(attempts.scalers, moves=False):
            twin = tf.function(attempts.take_inlined).get_concrete_function(attempts.moment.batch).graph
    except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion):
        return ()  # Some layer may not run in another dtype.
    graph, names = seen.operations[inside[0].name].graph, {frame.name.rpartition(":")[0] for frame in inside}
    found = [one for one in lost_literals(graph, twin) if one.node in names]
    return tuple({(one.before, one.after, one.chosen): one for one in found}.values())
