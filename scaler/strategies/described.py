"""A strategy in words, for messages."""

from __future__ import annotations

import dataclasses

from scaler.checks import is_symbolic


def described(strategy: object) -> str:
    """A strategy as one would write it: its class, with the values that are not defaults."""
    if dataclasses.is_dataclass(strategy):
        fields = [field for field in dataclasses.fields(strategy) if field.init]
        values = [(field, getattr(strategy, field.name)) for field in fields]
        said = [f"{field.name}={_value(value)}" for field, value in values if not _same(value, field.default)]
        return f"{type(strategy).__name__}({', '.join(said)})"
    # Without a `repr` of its own, an object would be told by its address.
    own = type(strategy).__repr__ is not object.__repr__
    return repr(strategy) if own else f"{type(strategy).__name__}()"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    if is_symbolic(value):
        return str(value.numpy()) if hasattr(value, "numpy") else "a tensor"
    return described(value) if dataclasses.is_dataclass(value) else repr(value)


def _same(value: object, default: object) -> bool:
    return not is_symbolic(value) and value == default
