"""The position of a source as JSON, and back: no pickle, and nothing is imported for it.

JSON has no bytes, tuples, arrays and keys that are no text. Each is an object with the key `_KIND`.
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from loops.support.errors import CheckpointError

_KIND, _VALUE = "halfstep", "value"
_PLAIN = (bool, int, float, str, type(None))
_DEEPEST = 80
"""Below what `facts.parse` reads: a checkpoint that could not be read again would be no use."""
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
        return _made("bytes", _text(bytes(state)))
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
        return _made("array", [state.dtype.str, list(state.shape), _text(state.tobytes())])
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


def _text(data: bytes) -> str:
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
