"""The Arrow stream of a trace: its schema, and one record batch per visit. docs/trace.md documents it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loops.record.steps import DECISIONS, NUMBERS
from loops.record.trace.frames import Frame
from loops.record.trace.messages import BLANK, KEY, arrow, sealed
from loops.record.trace.tensors import Tensor
from loops.support.json_values import read_json

VERSION = "1"
"""The version of the format. A reader refuses any other."""
STEP, HISTOGRAMS = "step", "histograms"
"""The kinds of rows."""
GAUGES = "gauges"
"""The column of what ready probes measured, and the entry with their names: a trace without such probes has neither."""
UNMEASURED = np.float32(-1.0)
"""In the place of the largest magnitude of a tensor whose part of the step was not measured, where others were."""
_NULL_FOR_NAN = ("critical_low", "critical_high", "headroom")
_COMPRESSED_FROM = 2**15
"""A batch of fewer bytes is not compressed: each of its columns would cost more time than it saves room."""


def schema_of(
    tensors: Sequence[Tensor], lacks: Sequence[str] = (), gauges: Sequence[str] = (), parts: Sequence[str] = ()
) -> Any:
    """The Arrow schema of a trace.

    Args:
        tensors: The measured tensors.
        lacks: From `tensors.lacks_of`.
        gauges: From `gauges.gauges_of`.
        parts: The names of the parts of a `ComposedStep`.
    """
    pa = arrow()
    metadata = {
        "halfstep.trace": VERSION,
        "tensors": json.dumps([dataclasses.asdict(tensor) for tensor in tensors]),
        **({"lacks": json.dumps(list(lacks))} if lacks else {}),
        **({GAUGES: json.dumps(list(gauges))} if gauges else {}),
        **({"parts": json.dumps(list(parts))} if parts else {}),
        KEY: BLANK,
    }
    fields = [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        *(pa.field(name, pa.float64()) for name in NUMBERS),
        *(pa.field(name, pa.bool_()) for name in DECISIONS),
        pa.field("cause", pa.string()),
        pa.field("amax", pa.list_(pa.float32())),
        pa.field("tensor", pa.list_(pa.int32())),
        pa.field("bin", pa.list_(pa.int16())),
        pa.field("count", pa.list_(pa.int64())),
        *([pa.field(GAUGES, pa.list_(pa.float32()))] if gauges else []),
    ]
    return pa.schema(fields, metadata)


class Described(NamedTuple):
    """What a trace says of itself: the arguments of `schema_of`."""

    tensors: list[Tensor]
    lacks: tuple[str, ...] = ()
    gauges: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def described_in(schema: Any) -> Described | None:
    """What a `pyarrow.Schema` says of its trace, or None if it is not the schema of a trace of this version."""
    metadata = schema.metadata or {}
    if metadata.get(b"halfstep.trace") != VERSION.encode() or not _has_columns(schema, schema_of([])):
        return None
    try:
        tensors = [Tensor(**fields) for fields in read_json(metadata[b"tensors"])]
    except (KeyError, TypeError, ValueError):
        return None
    if not all(map(_is_tensor, tensors)):
        return None
    lacks, gauges, parts = (_texts(metadata.get(key, b"[]")) for key in (b"lacks", GAUGES.encode(), b"parts"))
    wide = len(set(gauges)) == len(gauges) and gauges and _has_columns(schema, schema_of([], gauges=gauges))
    return Described(tensors, lacks, gauges if wide else (), parts)


def _has_columns(schema: Any, wanted: Any) -> bool:
    """Whether a schema has all columns of another one, each once, with their types."""
    try:
        names = schema.names
    except UnicodeDecodeError:
        return False
    return all(names.count(one.name) == 1 and schema.field(one.name).type == one.type for one in wanted)


def _is_tensor(tensor: Tensor) -> bool:
    texts, flags = (tensor.name, tensor.format), (tensor.carries_scale, tensor.certain)
    return all(isinstance(text, str) for text in texts) and all(isinstance(flag, bool) for flag in flags)


def _texts(value: bytes) -> tuple[str, ...]:
    try:
        found = read_json(value)
    except ValueError:
        return ()
    return tuple(one for one in found if isinstance(one, str)) if isinstance(found, list) else ()


def opening(schema: Any) -> bytes:
    """The first message of a file."""
    return sealed(schema.serialize().to_pybytes())


def batch_of(
    schema: Any,
    first: int,
    columns: Mapping[str, np.ndarray],
    causes: Sequence[str | None],
    amax: Sequence[np.ndarray | None] | None,
    frames: Sequence[Frame],
    gauges: Sequence[np.ndarray | None] | None = None,
) -> bytes:
    """One batch: a row for each step, then a row for each frame.

    Args:
        schema: From `schema_of`.
        first: The number of the first step.
        columns: Arrays [steps] by the names of columns; other names are ignored.
        causes: Names of a `scaler.Cause` [steps], or None for a step that was not skipped.
        amax: Float32 [tensors] for each step, `UNMEASURED` for each tensor that was not measured, or None for a step
            that was not; or None for all.
        frames: Histograms to write.
        gauges: Float32 [gauges], likewise.
    """
    pa = arrow()
    steps, kinds = len(causes), [STEP] * len(causes) + [HISTOGRAMS] * len(frames)
    nothing = [None] * steps

    def padded(values: Any, kind: Any, null_for_nan: bool = False) -> Any:
        column = pa.nulls(steps, kind) if values is None else pa.array(values, kind, from_pandas=null_for_nan)
        return pa.concat_arrays([column, pa.nulls(len(frames), kind)]) if frames else column

    arrays = [
        pa.array(kinds),
        pa.array([*range(first, first + steps), *(frame.step for frame in frames)], pa.int64()),
        *(padded(_as(np.float64, columns.get(name)), pa.float64(), name in _NULL_FOR_NAN) for name in NUMBERS),
        *(padded(_as(np.bool_, columns.get(name)), pa.bool_()) for name in DECISIONS),
        padded(list(causes), pa.string()),
        _lists(pa.float32(), np.float32, [*(nothing if amax is None else amax), *[None] * len(frames)]),
        _lists(pa.int32(), np.int32, [*nothing, *(frame.tensor for frame in frames)]),
        _lists(pa.int16(), np.int16, [*nothing, *(frame.bin for frame in frames)]),
        _lists(pa.int64(), np.int64, [*nothing, *(frame.counts for frame in frames)]),
    ]
    if gauges is not None:
        arrays.append(_lists(pa.float32(), np.float32, [*gauges, *[None] * len(frames)]))
    sink, batch = pa.BufferOutputStream(), pa.record_batch(arrays, schema=schema)
    options = pa.ipc.IpcWriteOptions(compression="zstd" if batch.nbytes >= _COMPRESSED_FROM else None)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={KEY: BLANK})
        end = sink.tell()
    return sealed(sink.getvalue().to_pybytes()[len(schema.serialize()) : end])


def _as(dtype: Any, values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else np.asarray(values).astype(dtype)


def _lists(kind: Any, dtype: Any, rows: Sequence[np.ndarray | None]) -> Any:
    """A column of lists, with null for None."""
    pa = arrow()
    if all(row is None for row in rows):
        return pa.nulls(len(rows), pa.list_(kind))
    offsets = np.cumsum([0, *(0 if row is None else len(row) for row in rows)]).astype(np.int32)
    values = np.concatenate([np.zeros([0], dtype), *(row for row in rows if row is not None)]).astype(dtype)
    missing = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind), mask=missing)
