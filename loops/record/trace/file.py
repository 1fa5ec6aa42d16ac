"""A trace's file: a sequence of messages, written and read as tables. A kill leaves at most the last one incomplete."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import shutil
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from loops.record.steps import DECISIONS, NUMBERS
from loops.record.trace.stream import (
    GAUGES,
    HISTOGRAMS,
    STEP,
    UNMEASURED,
    VERSION,
    Batches,
    Described,
    arrow,
    described_in,
    schema_in,
    whole_messages,
)
from loops.support.errors import LoopError, ResumeWarning, TraceWarning
from loops.support.written import AppendFile, as_path


class Contents(NamedTuple):
    """The contents of a trace's file up to its end, or to the first damage.

    Attributes:
        schema: A `pyarrow.Schema`, or None if it is damaged.
        what: What it says of the trace, or None if it is not that of a trace of this version.
        batches: A `pyarrow.RecordBatch` for each visit.
        starts: The start of each of them, in bytes.
        end: The end of the last intact message, in bytes.
        size: The size of the file, in bytes.
    """

    schema: Any
    what: Described | None
    batches: list
    starts: list[int]
    end: int
    size: int

    @property
    def whole(self) -> bool:
        """Whether the complete file could be read."""
        return self.end == self.size


def contents(data: bytes) -> Contents:
    """Parses the bytes of a file."""
    schema, what, reader, batches, starts, end = None, None, None, [], [], 0
    for message, after in whole_messages(data):
        if message.type != ("schema" if reader is None else "record batch"):
            break
        if reader is None:
            schema = schema_in(message)
            if schema is None:
                break
            what = described_in(schema)
            sizes = (len(what.tensors), len(what.gauges)) if what else (None, 0)
            reader = Batches(schema, len(data), *sizes)
        else:
            batch = reader.read(message)
            if batch is None:
                break
            batches.append(batch)
            starts.append(end)
        end = after
    return Contents(schema, what, batches, starts, end, len(data))


class TraceFile:
    """Appends messages to a file, also to one that an earlier run has left.

    Args:
        path: The file.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.end = 0
        self._file: AppendFile | None = None
        self._goes_on = False

    def keep(self, end: int) -> None:
        """Makes the next run continue after the first `end` bytes; with a `ResumeWarning` if some are missing."""
        self._goes_on = True
        # `read(end)` would take as much memory as a checkpoint says that the file is long.
        self.end = contents(self.path.read_bytes()[:end]).end if self.path.exists() else 0
        if self.end < end:
            self._set_aside(end)
        if self.path.exists():
            os.truncate(self.path, self.end)

    def keep_steps(self, step: int) -> int:
        """Has the next run go on after the pieces of steps up to one; a file that is damaged is copied before.

        Returns:
            The last step that is kept, 0 for none.
        """
        self._goes_on = True
        if not self.path.exists():
            return 0
        found = self.read()
        self.end = found.end
        if not found.whole:
            self._set_aside(found.size)
        lasts = [max(batch.column("step").to_pylist(), default=0) for batch in found.batches]
        later = next((place for place, last in enumerate(lasts) if last > step), None)
        if later is not None:
            self.end = found.starts[later]
        os.truncate(self.path, self.end)
        return max(lasts[:later], default=0)

    def open(self) -> None:
        """Opens the file, and empties it unless the run continues it."""
        for folder in self.path.parents:
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file, not a folder")
        self.end, self._goes_on = self.end if self._goes_on and self.path.exists() else 0, True
        self._file = AppendFile(self.path, self.end)

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()
            self._file = None

    @property
    def closed(self) -> bool:
        """Whether the file is not open."""
        return self._file is None

    def add(self, message: bytes) -> None:
        """Appends bytes: all of them, or none if they cannot be written."""
        assert self._file is not None
        self._file.add(message)
        self.end += len(message)

    def read(self) -> Contents:
        """The contents of the file."""
        return contents(self.path.read_bytes())

    def _set_aside(self, end: int) -> None:
        what = "is gone"
        if self.path.exists():
            aside = self.path.with_name(f"{self.path.name}.damaged")
            shutil.copyfile(self.path, aside)
            what = f"is damaged after {self.end} of {end} bytes, and was copied to {aside.name}"
        warnings.warn(
            f"{self.path} {what}: the trace continues without the lost steps.",
            ResumeWarning,
            stacklevel=4,
        )


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
