"""Scans a step, and reads magnitudes from the result.

Which step failed: the one that is asked about, or an earlier micro-batch of its window.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import keras

import scaler
from loops.diagnose.explain.attempts import Attempt, Attempts
from loops.diagnose.explain.explanation import Magnitude
from loops.diagnose.graph.origin import Frame, Part, magnitude, operation_in_float32
from loops.diagnose.graph.scan import Scan, scan
from loops.step.train_step import TrainStep


def scan_step(attempts: Attempts, layers: Mapping) -> Scan:
    """Scans the step without XLA, and restores the run."""
    step = attempts.moment.train_step
    plain = step.retraced(jit_compile=False) if isinstance(step, TrainStep) else contextlib.nullcontext()
    with attempts.as_it_was(), plain:
        return scan(
            attempts.take_inlined,
            attempts.moment.batch,
            layers,
            attempts.scalers,
            factor=attempts.scanned_at,
        )


def amax_in_float32(seen: Scan, first: Frame) -> float:
    """The largest magnitude that a tensor would have in float32, with the same inputs; NaN if unknown."""
    if first.source is not None:
        return math.nan
    operation = seen.operations[first.name]
    wide = operation_in_float32(operation, int(first.name.rpartition(":")[2]), seen.values)
    return math.nan if wide is None else magnitude(wide)[0]


def magnitudes(seen: Scan, layers: Mapping[str, keras.layers.Layer]) -> tuple[Magnitude, ...]:
    """The largest magnitudes in each layer, in the order of the forward pass."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for frame in seen.frames.values():
        if frame.layer is None or frame.source is not None or frame.kind == "Const" or frame.penalty:
            continue
        if frame.part is Part.FORWARD:
            # The last tensor of a layer is its output.
            forward[frame.layer] = math.nan if frame.has_nan else frame.amax
        elif frame.part is Part.BACKWARD:
            largest = math.nan if frame.has_nan else max(frame.amax, backward.get(frame.layer, 0.0))
            backward[frame.layer] = largest
    return tuple(
        Magnitude(path, forward.get(path), backward.get(path), layers[path].compute_dtype)
        for path in seen.order
        if path in layers and (path in forward or path in backward)
    )


def same_as_unobserved(attempt: Attempt, seen: Scan) -> bool:
    """Whether the scanned step was finite exactly if the unobserved step was."""
    given = [*seen.losses, *(name for names in seen.gradients for name in names if name is not None)]
    observed = all(seen.frames[name].finite for name in given if name in seen.frames)
    loss = all(seen.frames[name].finite for name in seen.losses if name in seen.frames)
    if "loss" in attempt.outputs and seen.losses and loss != math.isfinite(attempt.loss):
        return False
    of_finite = (scaler.Cause.TOO_LARGE, scaler.Cause.UPDATE, scaler.Cause.SPIKE)
    return observed == attempt.finite or attempt.cause in of_finite


def failing(moment: Any, attempts: Attempts) -> tuple[int, Attempt]:
    """The failed step and its attempt: this step, or an earlier micro-batch that spoiled the window of this one."""
    attempt = attempts.as_run()
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


def was_skipped(moment: Any) -> bool:
    """Whether the run's log says that the step was skipped."""
    logged = moment.logged or {}
    return bool(logged.get("attempted", True)) and logged.get("applied") is False
