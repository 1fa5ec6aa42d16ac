"""Values as JSON that tells them apart in another process: none holds the address of an object."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
_NOT_WHAT_IT_HOLDS = (tf.data.Dataset, keras.layers.Layer, tf.Module)
"""Their text says nothing of their contents."""


class NoText(Exception):
    """A value that no text tells from others. Its argument is the value."""


def exact(value: object) -> Any:
    """A value as JSON, by which it is told from every other one; arrays by dtype, shape and a digest.

    Raises:
        NoText: If a part of it has no text that another process would read the same, such as a function.
    """

    def unknown(part: object) -> Any:
        raise NoText(part)

    try:
        return _as_json(value, unknown)
    except RecursionError:
        raise NoText(value) from None


def described(value: object) -> Any:
    """A value as JSON, in which parts that no text tells apart have the name of their class, or of the function."""
    try:
        return _as_json(value, _name)
    except RecursionError:  # It holds itself.
        return _name(value)


def text_of(value: object) -> Any:
    """The value's own text; where that holds an address, its description."""
    text = repr(value)
    return described(value) if _ADDRESS.search(text) else text


def _name(value: object) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)


def _as_json(value: Any, unknown: Callable[[object], Any]) -> Any:
    def inside(part: object) -> Any:
        return _as_json(part, unknown)

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name or value.value}"
    if isinstance(value, Mapping):
        return _by_name(value, unknown)
    if isinstance(value, (set, frozenset)):
        return sorted(map(inside, value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [inside(part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return _digest(np.frombuffer(value, np.uint8))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, **_by_name(fields, unknown)}
    if isinstance(value, _COMPOSITE):
        return [inside(part) for part in tf.nest.flatten(value, expand_composites=True)]
    if hasattr(type(value), "__array__"):
        return _of_array(value, unknown)
    return _of_object(value, unknown)


def _by_name(values: Mapping, unknown: Callable[[object], Any]) -> dict[str, Any]:
    def name(key: Any) -> str:
        found = _as_json(key, unknown)
        return found if isinstance(found, str) else json.dumps(found)

    found = {name(key): _as_json(value, unknown) for key, value in values.items()}
    if len(found) < len(values):
        unknown(values)
    return found


def _of_array(value: Any, unknown: Callable[[object], Any]) -> Any:
    try:
        array = np.asarray(value)
    except Exception:  # Of a symbolic tensor each library raises its own.
        return unknown(value)
    if array.ndim == 0:
        item = array.item()
        return unknown(value) if hasattr(type(item), "__array__") else _as_json(item, unknown)
    if array.dtype == object:
        return [_as_json(part, unknown) for part in array.tolist()]
    return _digest(array)


def _digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{array.dtype.name}{list(array.shape)} {digest}"


def _of_object(value: Any, unknown: Callable[[object], Any]) -> Any:
    if isinstance(value, _NOT_WHAT_IT_HOLDS):
        return unknown(value)
    if hasattr(type(value), "get_config") and not isinstance(value, type):
        try:
            return {"class": type(value).__qualname__, **_by_name(value.get_config(), unknown)}
        except NotImplementedError:
            pass
    text = repr(value)
    if not _ADDRESS.search(text):
        return text
    attributes = _attributes(value)
    if attributes is None:
        return unknown(value)
    return {"class": type(value).__qualname__, **_by_name(attributes, unknown)}


def _attributes(value: Any) -> dict | None:
    """The attributes that make up all of an object, as pickle would take them; None if there is more to it."""
    if type(value) is object or type(value).__reduce__ is not object.__reduce__:
        return None
    try:
        _, arguments, state, *items = value.__reduce_ex__(2)
    except Exception:  # A function, an open file, ...
        return None
    whole = len(arguments) == 1 and not any(item is not None for item in items)
    return (state or {}) if whole and isinstance(state, (dict, type(None))) else None
