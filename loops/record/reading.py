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
from loops.record.files import STEPS, TRACE, check_run, counted_in, log_of, metadata_of, replayed_in, trace_of
from loops.record.lines import evaluations_in
from loops.record.log import Log, read_columns
from loops.record.steps import DECISIONS, NUMBERS, Gauges, Measured, Recorded, Steps, cause_name, joined, parts_at
from loops.record.trace import TraceTables, read
from loops.record.trace.tensors import probes_for
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
        return _made("trace", None, source)
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
    if found is not None and log:
        notes += found.damage(log.name, "the column is left out")
    tables = _tables(trace, not found, notes) if trace else None
    if trace is None:
        parts = tuple(part_names(found.columns)) if found else ()
        how = "" if parts else _BY_COMMAND
        notes.append(_NO_TRACE.format(how=how, trace=TRACE, probes=probes_for(parts)))
    replayed, evaluations = replayed_in(folder, notes), evaluations_in(folder, log)
    of_folder = {"place": str(run), "replayed": replayed, "evaluations": evaluations, **metadata_of(folder)._asdict()}
    recorded = _made(place.resolve().name, found, tables, notes, **of_folder)
    if not len(recorded):
        lacking = [note for note in notes if _DAMAGED in note]
        if lacking:
            raise LoopError(f"{run}: no step can be read there. {' '.join(lacking)}")
        raise LoopError(
            f"{run}: no step is recorded there, neither in a trace ({TRACE}) nor in a log ({STEPS}). Give the run "
            f'hs.Trace("run/{TRACE}") or hs.JsonLines("run/{STEPS}"), or wait for its first visit.'
        )
    return dataclasses.replace(recorded, counted=counted_in(folder, recorded.step[recorded.known].tolist()))


def distinct(runs: Sequence[Recorded]) -> list[Recorded]:
    """The runs with distinct names: their places where names are equal, or numbers where the places do not help."""
    names, places = [run.name for run in runs], [run.place for run in runs]

    def name(run: Recorded, number: int) -> str:
        if names.count(run.name) == 1:
            return run.name
        return run.place if run.place and places.count(run.place) == 1 else f"{run.name} {number}"

    return [dataclasses.replace(run, name=name(run, number)) for number, run in enumerate(runs, 1)]


def read_steps(trace: pathlib.Path | None, log: pathlib.Path | None) -> Recorded:
    """The steps of a trace and of a log, each of which may be missing or damaged, without metadata.

    Text in the place of a number is an unknown number. Only a loss that is text leaves out all losses of its log, since
    an unknown loss would be told as one that is not finite.
    """
    found = read_columns(log) if log is not None and log.is_file() else None
    if found is not None:
        with_text = {name: values for name, values in found.with_text.items() if name != "loss"}
        found = dataclasses.replace(found, columns={**found.columns, **with_text})
    return _made("", found, _tables(trace, False, []) if trace is not None and trace.is_file() else None)


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


def _made(name: str, log: Log | None, tables: TraceTables | None, notes: Sequence[str] = (), **facts: Any) -> Recorded:
    """The run of a log, a trace, or both. A trace of another run than the log is left out.

    Args:
        name: Of the run.
        log: Its log, or None.
        tables: Its trace, or None.
        notes: What is missing or damaged so far.
        facts: Further fields of a `Recorded`.
    """
    traced = steps_in(tables.steps) if tables else None
    if traced is not None and log is not None and (step := parts_at(traced, log)) is not None:
        notes = [*notes, _OTHER_RUN.format(step=step)]
        tables = traced = None
    both = joined(traced, log)
    run = Recorded(both.step, both.columns, both.cause, name=name, notes=tuple(notes), **facts)
    if not tables or traced is None:
        return run
    tensors = _measured_in(tables)
    parts = tables.parts or (tuple(part_names(log.columns)) if log is not None else ())
    return dataclasses.replace(
        run,
        tensors=tensors,
        gauges=_gauges_in(tables),
        traced=True,
        parts=parts,
        lacks=tables.lacks,
        notes=(*run.notes, *_lacking(tensors, traced.column("headroom"), parts)),
    )


_OTHER_RUN = (
    "The trace is of another run than the log, which has other numbers at step {step:,}: it was left out. Remove it, "
    "or give each run a folder of its own."
)


def _lacking(tensors: Measured | None, headroom: np.ndarray, parts: Sequence[str]) -> list[str]:
    """What a trace lacks: tensors, histograms, or the headroom of those that were measured."""
    if tensors is None:
        return [_NO_TENSORS.format(probes=probes_for(parts))]
    notes = [] if len(tensors.frames) else [_NO_HISTOGRAMS]
    if len(tensors.step) and np.isnan(headroom).all():
        notes.append(_NOT_WATCHED.format(probes=probes_for(parts)) if tensors.carries_scale.all() else _ZERO)
    return notes


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
    return Recorded(step, known, cause, name="arrays")


def steps_in(steps: Any) -> Steps:
    """The steps of a trace as a table. Columns that are all null are left out.

    Args:
        steps: A `pyarrow.Table` with the columns of `TraceTables.steps`.
    """
    columns = {
        name: _floats(steps[name])
        for name in (*NUMBERS, *DECISIONS)
        if name in steps.column_names and steps[name].null_count < len(steps)
    }
    cause = np.array([cause_name(one) for one in steps["cause"].to_pylist()], np.str_)
    return Steps(steps["step"].to_numpy().astype(np.int64), columns, cause)


def _measured_in(tables: TraceTables) -> Measured | None:
    """What probes measured, or None if there were none."""
    names = tables.tensors["name"].to_pylist()
    if not names or not len(tables.steps):
        return None
    columns = [tables.steps[f"amax/{name}"] for name in names]
    missing = np.stack([np.asarray(column.combine_chunks().is_null()) for column in columns], axis=1)
    # A step without probes is null in every tensor; one that some part did not take, in those of the part.
    known = ~missing.all(axis=1)
    amax = np.where(missing, 0.0, np.stack([_floats(column) for column in columns], axis=1)).astype(np.float32)
    entries = tables.histograms
    tensor = entries["tensor"].combine_chunks()
    return Measured(
        step=tables.steps["step"].to_numpy().astype(np.int64)[known],
        names=tuple(names),
        formats=tuple(tables.tensors["format"].to_pylist()),
        carries_scale=np.array(tables.tensors["carries_scale"].to_pylist(), bool),
        amax=amax[known],
        missing=missing[known],
        counted=entries["step"].to_numpy().astype(np.int64),
        tensor=np.asarray(tensor.indices).astype(np.int64) if len(entries) else np.zeros(0, np.int64),
        bin=entries["bin"].to_numpy().astype(np.int64),
        count=entries["count"].to_numpy().astype(np.int64),
    )


def _gauges_in(tables: TraceTables) -> Gauges | None:
    """What ready probes measured, or None if there were none."""
    outputs = tuple(f"{output}/" for outputs in scaler.observe.GAUGES.values() for output in outputs)
    names = [name for name in tables.steps.column_names if name.startswith(outputs)]
    if not names or not len(tables.steps):
        return None
    values = np.stack([_floats(tables.steps[name]) for name in names], axis=1)
    return Gauges(tables.steps["step"].to_numpy().astype(np.int64), tuple(names), values)


def _floats(column: Any) -> np.ndarray:
    """The column as float64, with NaN for null."""
    import pyarrow as pa

    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)
