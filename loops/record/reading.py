"""Reads a run from its folder, from one of its files, from a trace's tables, or from arrays.

Joins a run's log and its trace, each of which may have steps that the other lacks.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import scaler
from loops.record.columns import DECISIONS, NUMBERS
from loops.record.evaluations import evaluations_in
from loops.record.files import STEPS, TRACE, check_run, log_of, trace_of
from loops.record.log import Log, read_columns
from loops.record.run import Measured, Recorded
from loops.record.run_metadata import counted_in, metadata_of, replayed_in
from loops.record.trace import TraceTables, read
from loops.record.trace_columns import columns_of, gauges_in, measured_in
from loops.record.watching import probes_for
from loops.support.errors import LoopError, TraceWarning
from loops.support.part_names import part_names

_NO_TRACE = (
    "No trace was recorded: the critical scale, the headroom and the exponents are unknown. To record them, {how}add "
    'hs.Trace("run/{trace}") to the actions, and make the step {probes}.'
)
_DAMAGED = "damaged"
_BY_COMMAND = "run halfstep train with --trace; in a program, "
_NO_PYARROW = 'The trace cannot be read without pyarrow: pip install "halfstep[trace]".'
_NO_TENSORS = "The trace has no tensors. To record them, make the step {probes}."
_NOT_WATCHED = (
    "The headroom of activations and weights is not known: no activations and no weights are watched. To measure it, "
    "make the step {probes}."
)
_ZERO = "The headroom of activations and weights is not known: all that was measured of them is zero."
_NO_HISTOGRAMS = (
    "The trace has no histograms yet. They are written at the steps that are multiples of hs.Trace(every=), around "
    "skips, and when the run ends."
)


def as_recorded(source: Any) -> Recorded:
    """Makes a recorded run of any source.

    Args:
        source: A `Recorded`; the path of a run's folder, trace, or log; what `loops.observe.read` returned; or a
            mapping of arrays [steps], such as `{"step": ..., "loss": ..., "loss_scale": ..., "applied": ...}`, where
            `step` may be left out.

    Raises:
        scaler.InvalidArgument: For anything else.
        LoopError: If nothing of the run can be read.
    """
    if isinstance(source, Recorded):
        return source
    if isinstance(source, (str, os.PathLike)):
        return read_run(source)
    if isinstance(source, TraceTables):
        return _made("trace", "", None, source, {}, {}, [])
    if isinstance(source, Mapping):
        return _of_arrays(source)
    raise scaler.InvalidArgument(
        f"{type(source).__name__}: expected a run's folder, its trace or its log, what hs.observe.read returned, or "
        "a mapping of arrays."
    )


def read_run(run: str | os.PathLike) -> Recorded:
    """Reads the trace of a run, its log, or both, and its metadata.

    Args:
        run: The `--out` of `halfstep train`, the folder of a program's actions, or one file: a trace, or the log of a
            `JsonLines` or a `Csv`.

    Raises:
        scaler.InvalidArgument: If there is no such folder or file.
        LoopError: If no step can be read there.
    """
    place = check_run(run, or_file=True)
    folder = place if place.is_dir() else place.parent
    trace, log = files_of(place)
    notes: list[str] = []
    found = read_columns(log) if log else None
    if found and log:
        notes += found.damage(log.name, "the column is left out")
    tables = _tables(trace, found is None or not len(found.step), notes) if trace else None
    if trace is None:
        parts = tuple(part_names(found.columns)) if found else ()
        how = "" if parts else _BY_COMMAND
        notes.append(_NO_TRACE.format(how=how, trace=TRACE, probes=probes_for(parts)))
    facts, versions = metadata_of(folder)
    replayed = replayed_in(folder, notes)
    recorded = _made(place.resolve().name, str(run), found, tables, facts, versions, notes)
    if not len(recorded):
        lacking = [note for note in notes if _DAMAGED in note]
        if lacking:
            raise LoopError(f"{run}: no step can be read there. {' '.join(lacking)}")
        raise LoopError(
            f"{run}: no step is recorded there, neither in a trace ({TRACE}) nor in a log ({STEPS}). Give the run "
            f'hs.Trace("run/{TRACE}") or hs.JsonLines("run/{STEPS}"), or wait for its first visit.'
        )
    counted = counted_in(folder, recorded.step[recorded.known].tolist())
    return dataclasses.replace(recorded, replayed=replayed, counted=counted, evaluations=evaluations_in(folder, log))


def read_steps(trace: pathlib.Path, log: pathlib.Path | None) -> Recorded:
    """The steps of a trace and of a log, each of which may be missing or damaged, without metadata."""
    found = read_columns(log) if log is not None and log.is_file() else None
    return _made("", "", found, _tables(trace, False, []) if trace.is_file() else None, {}, {}, [])


def files_of(place: pathlib.Path) -> tuple[pathlib.Path | None, pathlib.Path | None]:
    """The trace and the log of a run; None for each that it does not have.

    Raises:
        LoopError: If there are several, and none has the default name.
    """
    if not place.is_dir():
        return (None, place) if place.suffix in (".jsonl", ".csv") else (place, None)
    return trace_of(place), log_of(place)


def _tables(path: pathlib.Path, alone: bool, notes: list[str]) -> TraceTables | None:
    if not alone and importlib.util.find_spec("pyarrow") is None:
        notes.append(_NO_PYARROW)
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TraceWarning)
        try:
            tables = read(path)
        except LoopError as error:
            if alone:
                raise
            notes.append(f"{error}")
            return None
    notes.extend(str(one.message) for one in caught if issubclass(one.category, TraceWarning))
    return tables


def _made(
    name: str,
    place: str,
    log: Log | None,
    tables: TraceTables | None,
    facts: Mapping[str, Any],
    versions: Mapping[str, Any],
    notes: list[str],
) -> Recorded:
    traced = columns_of(tables.steps) if tables else None
    if traced and log and (step := parts_at(traced, log)) is not None:
        notes = [*notes, _OTHER_RUN.format(step=step)]
        tables = traced = None
    tensors = measured_in(tables) if tables else None
    if tables:
        parts = tables.parts or (tuple(part_names(log.columns)) if log else ())
        notes = notes + _missing(tensors, parts) + _unknown_headroom(tensors, traced.columns if traced else {}, parts)
    both = joined(traced, log)
    return Recorded(
        name,
        place,
        both.step,
        both.columns,
        both.cause,
        tensors,
        facts,
        versions,
        notes=tuple(notes),
        traced=bool(tables),
        gauges=gauges_in(tables) if tables else None,
    )


_OTHER_RUN = (
    "The trace is of another run than the log, which has other numbers at step {step:,}: it was left out. Remove it, "
    "or give each run a folder of its own."
)


def _unknown_headroom(tensors: Measured | None, columns: Mapping[str, np.ndarray], parts: Sequence[str]) -> list[str]:
    """Why no step has a headroom, if tensors were measured and none has."""
    if tensors is None or not len(tensors.step) or not np.isnan(columns.get("headroom", np.nan)).all():
        return []
    return [_NOT_WATCHED.format(probes=probes_for(parts)) if tensors.carries_scale.all() else _ZERO]


def _missing(tensors: Measured | None, parts: Sequence[str]) -> list[str]:
    if tensors is None:
        return [_NO_TENSORS.format(probes=probes_for(parts))]
    return [] if len(tensors.frames) else [_NO_HISTOGRAMS]


def _of_arrays(arrays: Mapping[str, Any]) -> Recorded:
    try:
        known = {name: np.asarray(arrays[name], np.float64) for name in (*NUMBERS, *DECISIONS) if name in arrays}
    except (TypeError, ValueError) as error:
        raise scaler.InvalidArgument(f"arrays {sorted(map(str, arrays))}: expected numbers ({error}).") from None
    sizes = {name: values.shape for name, values in known.items()}
    if not known or len(set(sizes.values())) != 1 or len(next(iter(sizes.values()))) != 1:
        raise scaler.InvalidArgument(
            f"arrays {sizes or sorted(map(str, arrays))}: expected arrays [steps] of one length, at least one of "
            f"{', '.join((*NUMBERS, *DECISIONS))}."
        )
    length = next(iter(sizes.values()))[0]
    step = np.asarray(arrays.get("step", np.arange(1, length + 1)), np.int64)
    if step.shape != (length,):
        raise scaler.InvalidArgument(f"step of shape {step.shape}: expected ({length},), like the other arrays.")
    cause = np.array([one or "" for one in arrays.get("cause", [""] * length)], np.str_)
    return Recorded("arrays", "", step, known, cause)


def joined(trace: Log | None, log: Log | None) -> Log:
    """The steps of both, each once. Where both have a number, that of the trace counts, which tells NaN from infinity.

    Args:
        trace: The columns of the trace, or None if there is none.
        log: Those of the log, or None if there is none.
    """
    parts = [part for part in (trace, log) if part is not None and len(part.step)]
    if len(parts) < 2:
        return parts[0] if parts else Log(np.zeros(0, np.int64), {}, np.zeros(0, np.str_), 0)
    first, second = parts
    step = np.union1d(first.step, second.step)
    places = tuple(np.searchsorted(step, part.step) for part in parts)
    columns = {}
    for name in first.columns | second.columns:
        own, other = (_spread(part.columns.get(name), at, len(step)) for part, at in zip(parts, places, strict=True))
        columns[name] = np.where(np.isnan(own), other, own)
    causes = [np.full(len(step), "", max(part.cause.dtype for part in parts)) for _ in parts]
    for cause, part, at in zip(causes, parts, places, strict=True):
        cause[at] = part.cause
    return Log(step, columns, np.where(causes[0] == "", causes[1], causes[0]), 0)


def parts_at(trace: Log, log: Log) -> int | None:
    """The first step that both have with another finite number in one of their columns: then they are of two runs."""
    common, here, there = np.intersect1d(trace.step, log.step, return_indices=True)
    differs = np.zeros(len(common), bool)
    for name in ("loss", "loss_scale", "grad_norm"):
        if name in trace.columns and name in log.columns:
            one, other = trace.columns[name][here], log.columns[name][there]
            known = np.isfinite(one) & np.isfinite(other)
            differs |= known & ~np.isclose(one, np.where(known, other, 0.0), rtol=1e-6, atol=0.0)
    return int(common[differs][0]) if differs.any() else None


def _spread(values: np.ndarray | None, at: np.ndarray, length: int) -> np.ndarray:
    """The values at their places among all steps, and NaN at the others."""
    found = np.full(length, np.nan)
    if values is not None:
        found[at] = values
    return found
