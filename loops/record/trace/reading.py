"""Reads a trace as tables."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from loops.record.steps import DECISIONS, NUMBERS
from loops.record.trace.file import Contents, contents
from loops.record.trace.messages import arrow
from loops.record.trace.stream import GAUGES, HISTOGRAMS, STEP, UNMEASURED, VERSION, Described
from loops.support.errors import LoopError, TraceWarning
from loops.support.written import as_path


@dataclasses.dataclass(frozen=True)
class TraceTables:
    """A trace as `pyarrow.Table`s, each of which has `to_pandas()`.

    Attributes:
        steps: A row for each step: `step`, `loss`, `loss_scale`, `grad_norm`, `clipped_norm`, `critical_low`,
            `critical_high`, `headroom`, `attempted`, `applied`, `cause`, and for each tensor its largest magnitude,
            such as `amax/activations/dense_1`; with ready probes also what they measured, such as
            `update_rms/dense_1`. Both are null at a step that was not measured. Those of the parts of a
            `ComposedStep` have the part's name before the layer's: `amax/activations/critic/dense_1`.
        histograms: A row for each step, tensor and nonempty bin: `step`, `tensor`, `bin`, `count`, sorted by these.
            `scaler.observe` defines the bins.
        tensors: A row for each tensor: `name`; `format`, in which it was computed; `carries_scale`, whether its values
            are multiplied by the loss scale.
        lacks: Why the largest gradient of a step is unknown despite probes: "replicas" or "micro-batches" if gradients
            were measured before they were summed, "weights" if some gradients were not measured.
        parts: The names of the parts, if it is a trace of a `ComposedStep`.
    """

    steps: Any
    histograms: Any
    tensors: Any
    lacks: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def read(path: str | os.PathLike) -> TraceTables:
    """Reads a trace, also while it is being written, or after a kill.

    Args:
        path: The path that was given to `Trace`.

    Raises:
        LoopError: Without pyarrow; if there is no such file, or it is not a trace of this version.
        scaler.InvalidArgument: If `path` is not a path.

    Warns:
        TraceWarning: If the file is incomplete or damaged; it is read up to that point.
    """
    place = as_path("read", "path", path)
    arrow()
    try:
        data = place.read_bytes()
    except OSError as error:
        raise LoopError(f"read({str(place)!r}): {error.strerror or error}. Give the path of a trace.") from error
    found = contents(data)
    if found.what is None:
        raise LoopError(
            f"{place}: not a trace of this version: {_why(found, data)} Give the path that was given to hs.Trace."
        )
    tables = _tables(found, found.what)
    if not found.whole:
        steps = tables.steps["step"].to_pylist()
        read_to = f"up to step {steps[-1]}" if steps else "without a single step"
        warnings.warn(
            f"{place} is incomplete or damaged at byte {found.end} of {found.size}: read {read_to}.", TraceWarning, 2
        )
    return tables


def _why(found: Contents, data: bytes) -> str:
    if not data:
        return "it is empty, as before the first visit of a run."
    if found.schema is None:
        return "it does not begin with a complete Arrow schema and its checksum."
    version = (found.schema.metadata or {}).get(b"halfstep.trace", b"none").decode(errors="replace")
    if version == VERSION:
        return "its columns, or the list of its tensors, are not those of a trace."
    return f"its format is {version[:40]}."


def _tables(found: Contents, what: Described) -> TraceTables:
    pa = arrow()
    names = [tensor.name for tensor in what.tensors]
    described = {
        "name": pa.array(names, pa.string()),
        "format": pa.array([tensor.format for tensor in what.tensors], pa.string()),
        "carries_scale": pa.array([tensor.carries_scale for tensor in what.tensors], pa.bool_()),
    }
    histograms = _histograms(pa, rows_of(found, HISTOGRAMS), names)
    steps = _steps(pa, rows_of(found, STEP), names, what.gauges)
    return TraceTables(steps, histograms, pa.table(described), what.lacks, what.parts)


def rows_of(found: Contents, kind: str) -> Any:
    """The rows of one kind, `STEP` or `HISTOGRAMS`, as a `pyarrow.Table`."""
    pa = arrow()
    table = pa.Table.from_batches(found.batches, found.schema)
    return table.filter(pa.array([one == kind for one in table["kind"].to_pylist()], pa.bool_()))


def _steps(pa: Any, table: Any, names: list[str], gauges: Sequence[str]) -> Any:
    columns = {name: table[name] for name in ("step", *NUMBERS, *DECISIONS, "cause")}
    columns |= _unlisted(pa, table["amax"], [f"amax/{name}" for name in names], UNMEASURED)
    return pa.table(columns | (_unlisted(pa, table[GAUGES], gauges) if gauges else {}))


def _unlisted(pa: Any, lists: Any, names: Sequence[str], unmeasured: float = np.nan) -> dict[str, Any]:
    """A column of lists as a column for each of their places, with null for the value that stands for none."""
    column = lists.combine_chunks()
    missing = np.asarray(column.is_null())
    values = np.zeros([len(column), len(names)], np.float32)
    if names:
        values[~missing] = column.flatten().to_numpy().reshape(-1, len(names))
    absent = missing[:, np.newaxis] | (values == unmeasured)
    return {name: pa.array(values[:, place], mask=absent[:, place]) for place, name in enumerate(names)}


def _histograms(pa: Any, table: Any, names: list[str]) -> Any:
    parts = {name: table[name].combine_chunks() for name in ("tensor", "bin", "count")}
    flat = {name: column.flatten().to_numpy() for name, column in parts.items()}
    lengths = np.diff(parts["tensor"].offsets.to_numpy()) if len(table) else np.zeros(0, int)
    step = np.repeat(table["step"].to_numpy(), lengths)
    # The flight recorder may write a step after later ones.
    order = np.argsort(step, kind="stable")
    named = pa.DictionaryArray.from_arrays(pa.array(flat["tensor"][order], pa.int32()), pa.array(names, pa.string()))
    return pa.table({"step": step[order], "tensor": named, "bin": flat["bin"][order], "count": flat["count"][order]})
