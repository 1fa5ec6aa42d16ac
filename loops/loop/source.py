"""A source that is no `tf.data` pipeline: its batches, copied as arrays, and its position, as JSON and back.

A source may reuse its own memory for the next batch. A position is no pickle, and nothing is imported for it: JSON has
no bytes, tuples, arrays and keys that are no text, so each is an object with the key `_KIND`.
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from loops.support.errors import BadBatch, CheckpointError

_STATEFUL = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""Methods that read and set a position: of Grain; of torchdata's `StatefulDataLoader` and Hugging Face's datasets."""


class Source:
    """An iterable and its iterator.

    Args:
        batches: Any iterable. Its position is that of the iterable itself if it has one, else that of its iterator.

    Attributes:
        iterator: Gives the batches.
        holder: What has the position, or None.
    """

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches
        self.iterator: Iterator[Any] = iter(batches)
        kinds = ((one, names) for one in (batches, self.iterator) for names in _STATEFUL)
        found = ((one, names) for one, names in kinds if all(callable(getattr(one, name, None)) for name in names))
        self.holder: Any
        self.holder, self._names = next(found, (None, ("", "")))

    @property
    def name(self) -> str:
        """The class of what holds the position: the same for a loader and for an iterator made of it."""
        return type(self._batches if self.holder is None else self.holder).__qualname__

    @property
    def length(self) -> int | None:
        """How many batches it says that it has, or None if it does not say."""
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except Exception:  # Each library has its own way to say that there is no length.
            return None

    def state(self) -> Any:
        """Its position; only with a `holder`."""
        return getattr(self.holder, self._names[0])()

    def restore(self, state: Any) -> None:
        """Goes to a position; only with a `holder`. Raises what the source raises."""
        getattr(self.holder, self._names[1])(state)
        if self.holder is self._batches:
            self.iterator = iter(self._batches)


_ELEMENTS = (bool, int, float, complex, str, bytes, np.generic)


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
    return sum(array.nbytes + sum(map(len, _texts(array))) for array in tf.nest.flatten(batch))


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


def _texts(array: np.ndarray) -> Iterable[str | bytes]:
    return array.flat if array.dtype.kind == "O" else ()


def _holds_numbers(values: list) -> bool:
    return all(isinstance(one, _ELEMENTS) or (isinstance(one, list) and _holds_numbers(one)) for one in values)


_KIND, _VALUE = "halfstep", "value"
_PLAIN = (bool, int, float, str, type(None))
_DEEPEST = 80
"""Below what `folder.parse` reads: a checkpoint that could not be read again would be no use."""
_NUMBERS = "biufc"
"""The kinds of NumPy's dtypes that are bytes without a meaning of their own."""


def encode(state: Any, where: str = "state", level: int = 0) -> Any:
    """A position as JSON.

    Args:
        state: None, bools, numbers, text, bytes, arrays of numbers and PyTorch's tensors, in dicts, lists and tuples.
        where: How to name it in an error.
        level: In how many lists and objects it lies.

    Raises:
        CheckpointError: If it holds something else, or is nested deeper than the facts of a checkpoint may be.
    """
    if level > _DEEPEST:
        raise CheckpointError(
            f"the position of the source of batches cannot be saved: it is nested more than {_DEEPEST} levels deep."
        )
    if type(state) in _PLAIN:
        return state
    if isinstance(state, (bytes, bytearray)):
        return _made("bytes", _base64(bytes(state)))
    if type(state) in (list, tuple):
        deeper = level + (2 if type(state) is tuple else 1)
        values = [encode(part, f"{where}[{number}]", deeper) for number, part in enumerate(state)]
        return _made("tuple", values) if type(state) is tuple else values
    if isinstance(state, Mapping):
        as_object = all(type(key) is str for key in state) and _KIND not in state
        deeper = level + (1 if as_object else 3)
        items = [(key, encode(value, f"{where}[{key!r}]", deeper)) for key, value in state.items()]
        if as_object:
            return dict(items)
        return _made("dict", [[encode(key, f"a key of {where}", deeper), value] for key, value in items])
    if type(state).__module__.split(".")[0] == "torch" and callable(getattr(state, "numpy", None)):
        return _made("tensor", encode(state.numpy(), where))
    if isinstance(state, (np.ndarray, np.generic)) and state.dtype.kind in _NUMBERS:
        return _made("array", [state.dtype.str, list(state.shape), _base64(state.tobytes())])
    raise CheckpointError(
        f"the position of the source of batches cannot be saved: its {where} is a {type(state).__qualname__}. "
        "Expected numbers, text, bytes and arrays in dicts, lists and tuples, since a checkpoint is never unpickled."
    )


def decode(value: Any) -> Any:
    """What `encode` was given.

    Raises:
        ValueError: If it is not what `encode` returned.
    """
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(part) for key, part in value.items()}
    kind, inner = value[_KIND], value.get(_VALUE, ())
    try:
        if kind == "bytes":
            return base64.b64decode(inner, validate=True)
        if kind == "tuple":
            return tuple(decode(part) for part in inner)
        if kind == "dict":
            return {decode(key): decode(part) for key, part in inner}
        if kind == "tensor":
            return _tensor(decode(inner))
        if kind == "array":
            return _array(*inner)
    except (TypeError, binascii.Error) as error:
        raise ValueError(f"its {kind} is none") from error
    raise ValueError(f"it has a part of the kind {str(kind)[:40]!r}")


def _made(kind: str, value: Any) -> dict:
    return {_KIND: kind, _VALUE: value}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _array(dtype: str, shape: list[int], text: str) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in _NUMBERS:
        raise ValueError(f"it has an array of {kind.name}")
    # A copy, since what is read from bytes cannot be written to; a scalar stays one.
    return np.frombuffer(base64.b64decode(text, validate=True), kind).reshape(shape).copy()[()]


def _tensor(array: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ValueError("it has a tensor of PyTorch, which this program has not imported")
    return torch.from_numpy(np.asarray(array))
