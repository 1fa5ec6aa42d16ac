"""Checks that a message of a trace is well formed. Its checksum catches accidents, but stops no attacker."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

import scaler
from loops.record.columns import DECISIONS, NUMBERS
from loops.record.trace.messages import arrow
from loops.record.trace.unpacked import unpacked_size

MOST = 2**30
"""The bytes that the batches of any trace may take once they are unpacked."""
_RATIO = 100
"""What they may take beyond it, as a multiple of the file's size; zeros and ones alone are packed to a twentieth."""
_LISTS = ("tensor", "bin", "count")


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
        tensors: The number of measured tensors, or None if that is unknown: then the values are not looked at.
        size: Of the file, in bytes.
        gauges: The number of measured gauges.
    """

    def __init__(self, schema: Any, tensors: int | None, size: int, gauges: int = 0):
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
        if self._tensors is None:
            return batch
        return batch if _fits(batch, self._tensors) and (not self._gauges or _is_wide(batch, self._gauges)) else None


def has_columns(schema: Any) -> bool:
    """Whether a schema has all columns of a trace, with their types."""
    pa = arrow()
    types = {"kind": pa.string(), "step": pa.int64(), "cause": pa.string(), "amax": pa.list_(pa.float32())}
    types |= {name: pa.float64() for name in NUMBERS} | {name: pa.bool_() for name in DECISIONS}
    types |= dict(zip(_LISTS, (pa.list_(pa.int32()), pa.list_(pa.int16()), pa.list_(pa.int64())), strict=True))
    try:
        names = schema.names
    except UnicodeDecodeError:
        return False
    return all(names.count(name) == 1 and schema.field(name).type == kind for name, kind in types.items())


def _fits(batch: Any, tensors: int) -> bool:
    """Whether the values are those of so many tensors, as whoever makes arrays of them takes for granted."""
    columns = [batch.column(name) for name in ("amax", *_LISTS)]
    if batch.column("kind").null_count or batch.column("step").null_count or not all(map(_is_plain, columns)):
        return False
    amax, tensor, place, count = columns
    alike = all(np.array_equal(_lengths(tensor), _lengths(other)) for other in (place, count))
    return (
        alike
        and _all_of(amax, tensors)
        and _within(tensor, tensors)
        and _within(place, scaler.observe.BINS)
        and _within(count, np.iinfo(np.int64).max)
    )


def _is_wide(batch: Any, gauges: int) -> bool:
    """Whether each step that was measured has so many gauges."""
    column = batch.column("gauges")
    return _is_plain(column) and _all_of(column, gauges)


def _all_of(column: Any, width: int) -> bool:
    return bool((_lengths(column)[~np.asarray(column.is_null())] == width).all())


def _is_plain(column: Any) -> bool:
    """Whether no value in the lists is null, and no list that is null has values all the same."""
    lengths = _lengths(column)
    return column.flatten().null_count == 0 and not lengths[np.asarray(column.is_null())].any()


def _lengths(column: Any) -> np.ndarray:
    return np.diff(column.offsets.to_numpy())


def _within(column: Any, end: int) -> bool:
    values = column.flatten().to_numpy()
    return bool(((values >= 0) & (values < end)).all())
