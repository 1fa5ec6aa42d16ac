"""Strategies written as text, for the command line."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable

import scaler

_PRESETS = {name: getattr(scaler.presets, name) for name in scaler.presets.__all__ if not name.endswith("_stuck")}
_FORMS = (
    "none, static:SCALE (static:1024), dynamic, dynamic:NAME=VALUE,... (dynamic:growth_interval=200), or a preset in "
    f"the same way (pytorch, deepspeed:hysteresis=3): {', '.join(_PRESETS)}"
)


def parse_strategy(text: str) -> scaler.Strategy:
    """The strategy a text names.

    Args:
        text: "none", "static:1024", "dynamic" or "dynamic:growth_interval=200,initial_scale=65536", and likewise the
            name of any strategy in `scaler.presets`. A number may be written as a power: "2**-10".

    Raises:
        scaler.InvalidArgument: For another form, an unknown name, or a value the strategy refuses.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "none" and not rest:
            return scaler.NoScaling()
        if kind == "static" and rest:
            return scaler.Static(_number(rest))
        if kind == "dynamic" or kind in _PRESETS:
            make = _PRESETS.get(kind, scaler.Dynamic)
            return make(**_arguments(rest, make))
    except scaler.InvalidArgument as error:
        raise scaler.InvalidArgument(f"strategy {text!r}: {error}") from error
    raise scaler.InvalidArgument(f"strategy {text!r}: expected {_FORMS}.")


def _arguments(rest: str, make: Callable[..., scaler.Strategy]) -> dict:
    parameters = inspect.signature(make).parameters
    arguments = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in parameters:
            raise scaler.InvalidArgument(f"{part!r} is none of {', '.join(parameters) or 'no arguments'}, with =VALUE.")
        arguments[name] = _number(value)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise scaler.InvalidArgument(f"{name} has no default here: add {name}=VALUE.")
    return arguments


def _number(value: str):
    """A number or True or False; whether it fits is for the strategy to say."""
    base, power, exponent = value.partition("**")
    try:
        parts = [ast.literal_eval(part) for part in ((base, exponent) if power else (base,))]
        # As floats, a power beyond every scale costs nothing to refuse.
        if not power:
            return parts[0]
        result = math.pow(*map(float, parts))
        return int(result) if all(isinstance(part, int) for part in parts) and result >= 1 else result
    except (ValueError, SyntaxError, TypeError, OverflowError) as error:
        raise scaler.InvalidArgument(f"{value!r} is no number.") from error
