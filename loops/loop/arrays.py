"""Copies of a source's batches as arrays: a source may reuse its own memory for the next batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from loops.support.errors import BadBatch

_PLAIN = (bool, int, float, complex, str, bytes, np.generic)


def arrays_of(batch: Any, where: str = "a batch") -> Any:
    """A copy of a batch: arrays in dicts and tuples. A list of numbers is an array, any other list is a tuple.

    Text is an array of objects, str or bytes: NumPy's own arrays of text drop zero bytes at the end.

    Args:
        batch: NumPy arrays, numbers, text and what has `numpy()`, such as tensors, in dicts, tuples and lists.
        where: How to name the batch in an error.

    Raises:
        BadBatch: If a part of it is something else.
    """
    if isinstance(batch, Mapping):
        try:
            sorted(batch)
        except TypeError:
            raise BadBatch(
                f"{where} of the source is a dict with keys of several kinds, {list(batch)!r:.100}: expected text."
            ) from None
        return {key: arrays_of(part, f"{where}[{key!r}]") for key, part in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and not _holds_numbers(batch)):
        parts = tuple(arrays_of(part, f"{where}[{number}]") for number, part in enumerate(batch))
        named = isinstance(batch, tuple) and type(batch) is not tuple
        return type(batch)(*parts) if named else parts
    numpy = getattr(batch, "numpy", None)
    if isinstance(batch, np.ma.MaskedArray) and np.ma.is_masked(batch):
        raise BadBatch(
            f"{where} of the source is a masked array, whose mask no tensor can hold: expected filled values, such as "
            "batch.filled(0), and the mask beside them as an array of its own."
        )
    array = _array_of(numpy() if callable(numpy) else batch)
    if array is None:
        of = f" of dtype {batch.dtype}" if isinstance(batch, np.ndarray) else ""
        raise BadBatch(
            f"{where} of the source is a {type(batch).__qualname__}{of}, not an array of numbers or text: expected "
            "NumPy arrays, or tensors with numpy(), in dicts and tuples."
        )
    return array


def _array_of(value: Any) -> np.ndarray | None:
    """A copy of a value as an array of numbers, or of objects if it is text; None if it is neither.

    A copy, since a source may use the memory of a batch again for the next one, which is fetched ahead.
    """
    try:
        array = np.array(value)
        if array.dtype.kind in "US":
            array = np.array(value, object)
        if array.dtype.kind == "O":
            return array if all(isinstance(one, (str, bytes)) for one in array.flat) else None
        tf.as_dtype(array.dtype)
    except (TypeError, ValueError):  # A dtype that TensorFlow lacks, or lists of different lengths.
        return None
    return array


def spec_of(batch: Any) -> Any:
    """The shapes and dtypes of a batch from `arrays_of`, as a dataset's `element_spec`."""
    return tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape, _dtype(array)), batch)


def shapes_of(batch: Any) -> tuple:
    """The shapes of a batch's arrays."""
    return tuple(array.shape for array in tf.nest.flatten(batch))


def size_of(batch: Any) -> int:
    """The bytes of a batch."""
    return sum(array.nbytes + sum(map(len, _text(array))) for array in tf.nest.flatten(batch))


def check_alike(batch: Any, spec: Any) -> None:
    """Compares a batch with the first one: only shapes may differ.

    Raises:
        BadBatch: If it has other parts, or another dtype.
    """
    try:
        tf.nest.assert_same_structure(spec, batch)
        pairs = zip(tf.nest.flatten(spec), tf.nest.flatten(batch), strict=True)
        same = all(one.dtype == _dtype(array) for one, array in pairs)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise BadBatch(
            f"a batch of the source is {spec_of(batch)}, and the first one was {spec}: expected the same parts and "
            "dtypes in all."
        )


def stack(batches: list[Any]) -> Any:
    """Batches of one shape as tensors [batches, ...]."""
    return tf.nest.map_structure(lambda *parts: tf.convert_to_tensor(np.stack(parts)), *batches)


def tensors_of(batch: Any) -> Any:
    """A batch as tensors."""
    return tf.nest.map_structure(tf.convert_to_tensor, batch)


def _dtype(array: np.ndarray) -> tf.DType:
    return tf.string if array.dtype.kind == "O" else tf.as_dtype(array.dtype)


def _text(array: np.ndarray) -> Iterable[str | bytes]:
    return array.flat if array.dtype.kind == "O" else ()


def _holds_numbers(values: list) -> bool:
    return all(isinstance(one, _PLAIN) or (isinstance(one, list) and _holds_numbers(one)) for one in values)
