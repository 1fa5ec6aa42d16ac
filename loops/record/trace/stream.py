"""The Arrow stream of a trace: its schema, and one record batch per visit, written and read. See docs/trace.md.

Arrow's format has no checksum: a flipped byte in a value is read as another value. So the custom metadata of each
message holds `crc32`, eight hexadecimal digits, computed over the whole message with eight zeros in their place.

The checksum catches accidents, but stops no attacker: a batch is checked to be well formed, too. How much memory it
takes once it is unpacked is known before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import scaler
from loops.record.steps import DECISIONS, NUMBERS
from loops.record.trace.tensors import Tensor
from loops.support.errors import LoopError
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


class Frame(NamedTuple):
    """The histograms of one step as a sparse array, with one entry for each nonzero count.

    Attributes:
        step: The number of the step.
        tensor: Int64 [entries], the index of the tensor among those measured.
        bin: Int64 [entries], see `scaler.observe`.
        counts: Int64 [entries].
    """

    step: int
    tensor: np.ndarray
    bin: np.ndarray
    counts: np.ndarray


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

    def padded(name: str, kind: Any, dtype: Any) -> Any:
        column = pa.nulls(steps, kind)
        if name in columns:
            column = pa.array(np.asarray(columns[name]).astype(dtype), kind, from_pandas=name in _NULL_FOR_NAN)
        return pa.concat_arrays([column, pa.nulls(len(frames), kind)]) if frames else column

    arrays = [
        pa.array(kinds),
        pa.array([*range(first, first + steps), *(frame.step for frame in frames)], pa.int64()),
        *(padded(name, pa.float64(), np.float64) for name in NUMBERS),
        *(padded(name, pa.bool_(), np.bool_) for name in DECISIONS),
        pa.array([*causes, *[None] * len(frames)], pa.string()),
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


def _lists(kind: Any, dtype: Any, rows: Sequence[np.ndarray | None]) -> Any:
    """A column of lists, with null for None."""
    pa = arrow()
    if all(row is None for row in rows):
        return pa.nulls(len(rows), pa.list_(kind))
    offsets = np.cumsum([0, *(0 if row is None else len(row) for row in rows)]).astype(np.int32)
    values = np.concatenate([np.zeros([0], dtype), *(row for row in rows if row is not None)]).astype(dtype)
    missing = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind), mask=missing)


KEY = "crc32"
_MARK = b"crc32="
_DIGITS = 8
BLANK = (_MARK + b"0" * _DIGITS).decode()
"""The value of `KEY` before a message is sealed."""
_PREFIX = 8
"""Bytes before a message's metadata: 0xFFFFFFFF, and the length of the metadata."""
MOST = 2**30
"""The bytes that the batches of any trace may take once they are unpacked."""
_RATIO = 100
"""What they may take beyond it, as a multiple of the file's size; zeros and ones alone are packed to a twentieth."""
_LISTS = ("tensor", "bin", "count")


def arrow() -> Any:
    """The module `pyarrow`, with `pyarrow.ipc` in it.

    Raises:
        LoopError: If it is not installed.
    """
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise LoopError('a trace needs pyarrow: pip install "halfstep[trace]"') from error
    return pyarrow


def sealed(message: bytes) -> bytes:
    """The message with its checksum in place of `BLANK`."""
    place = message.index(BLANK.encode()) + len(_MARK)
    return message[:place] + _digits(message) + message[place + _DIGITS :]


class Found(NamedTuple):
    """One intact message of a file.

    Attributes:
        message: A `pyarrow.ipc.Message`.
        end: The end of the message in the file, in bytes.
    """

    message: Any
    end: int


def whole_messages(data: bytes) -> Iterator[Found]:
    """The messages from the start up to the first one that is incomplete or has a wrong checksum."""
    pa = arrow()
    buffer, start = pa.py_buffer(data), 0
    while start < len(data):
        try:
            reader = pa.BufferReader(buffer.slice(start))
            message = pa.ipc.read_message(reader)
            end = start + reader.tell()
        except (pa.ArrowException, OSError, EOFError):
            return
        if not _is_sealed(data[start:end]):
            return
        yield Found(message, end)
        start = end


def _is_sealed(message: bytes) -> bool:
    # Metadata precedes the values, so bytes of a value that look like the mark are never found first.
    place = message.find(_MARK) + len(_MARK)
    if place < _PREFIX + len(_MARK):
        return False
    blank = message[:place] + b"0" * _DIGITS + message[place + _DIGITS :]
    return message[place : place + _DIGITS] == _digits(blank)


def _digits(message: bytes) -> bytes:
    return b"%08x" % zlib.crc32(message)


def schema_in(message: Any) -> Any:
    """The schema in a message, or None if it is none."""
    pa = arrow()
    try:
        return pa.ipc.read_schema(message)
    except (pa.ArrowException, OSError):
        return None


class Batches:
    """Reads the batches of one file.

    Args:
        schema: A `pyarrow.Schema`.
        size: Of the file, in bytes.
        tensors: The number of measured tensors, or None if that is unknown: then the values are not looked at.
        gauges: The number of measured gauges.
    """

    def __init__(self, schema: Any, size: int, tensors: int | None, gauges: int):
        self._schema, self._tensors, self._gauges = schema, tensors, gauges
        self._room = MOST + _RATIO * size

    def read(self, message: Any) -> Any:
        """The `pyarrow.RecordBatch` in a message, or None if it is damaged, or too large."""
        pa = arrow()
        try:
            self._room -= unpacked_size(message)
            if self._room < 0:
                return None
            batch = pa.ipc.read_record_batch(message, self._schema)
            # Reading follows the offsets of lists and texts, and trusts them.
            batch.validate(full=True)
        except (pa.ArrowException, OSError, struct.error):
            return None
        return batch if self._tensors is None or _fits(batch, self._tensors, self._gauges) else None


def _fits(batch: Any, tensors: int, gauges: int) -> bool:
    """Whether the values are those of so many tensors and gauges, as whoever makes arrays of them takes for granted."""
    amax, tensor, place, count = (batch.column(name) for name in ("amax", *_LISTS))
    wide = [(amax, tensors), *([(batch.column("gauges"), gauges)] if gauges else [])]
    ends = [(tensor, tensors), (place, scaler.observe.BINS), (count, np.iinfo(np.int64).max)]
    return (
        not batch.column("kind").null_count
        and not batch.column("step").null_count
        and all(map(_is_plain, (tensor, place, count, *(column for column, _ in wide))))
        and all((_lengths(column)[~np.asarray(column.is_null())] == width).all() for column, width in wide)
        and all(np.array_equal(_lengths(tensor), _lengths(other)) for other in (place, count))
        and all(_within(column, end) for column, end in ends)
    )


def _is_plain(column: Any) -> bool:
    """Whether no value in the lists is null, and no list that is null has values all the same."""
    lengths = _lengths(column)
    return column.flatten().null_count == 0 and not lengths[np.asarray(column.is_null())].any()


def _lengths(column: Any) -> np.ndarray:
    return np.diff(column.offsets.to_numpy())


def _within(column: Any, end: int) -> bool:
    values = column.flatten().to_numpy()
    return bool(((values >= 0) & (values < end)).all())


def unpacked_size(message: Any) -> int:
    """The bytes that the buffers of a batch say they take once they are unpacked: pyarrow allocates as many.

    They are in the message's flatbuffer, which pyarrow has verified, and before each packed buffer.
    """
    data, body = memoryview(message.metadata), memoryview(message.body)
    header = _field(data, _follow(data, 0), 2)
    if header is None or _field(data, batch := _follow(data, header), 3) is None:
        return 0  # Nothing is packed: all of it lies in the file.
    vector = _field(data, batch, 2)
    if vector is None:
        return 0
    start = _follow(data, vector)
    found = 0
    for number in range(struct.unpack_from("<I", data, start)[0]):
        offset, length = struct.unpack_from("<qq", data, start + 4 + 16 * number)
        # A length of -1 says that the buffer is as it is.
        size = max(struct.unpack_from("<q", body, offset)[0], 0) if length >= 8 and offset >= 0 else 0
        found += size
    return found


def _field(data: memoryview, table: int, field: int) -> int | None:
    """Where a field of a table of a flatbuffer lies, or None if the table does not have it."""
    fields, slot = table - struct.unpack_from("<i", data, table)[0], 4 + 2 * field
    if slot >= struct.unpack_from("<H", data, fields)[0]:
        return None
    offset = struct.unpack_from("<H", data, fields + slot)[0]
    return table + offset if offset else None


def _follow(data: memoryview, place: int) -> int:
    return place + struct.unpack_from("<I", data, place)[0]
