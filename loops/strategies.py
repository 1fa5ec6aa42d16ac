"""Strategies written as text, for the command line."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
from collections.abc import Callable, Iterable

import scaler

_STRATEGIES: dict[str, Callable[..., scaler.Strategy]] = {
    "dynamic": scaler.Dynamic,
    "headroom": scaler.Headroom,
    "histogram": scaler.Histogram,
    "delayed_amax": scaler.DelayedAmax,
    "log_normal": scaler.LogNormal,
    "smooth": scaler.Smooth,
}
_PRESETS = {name: getattr(scaler.presets, name) for name in scaler.presets.__all__ if not name.endswith("_stuck")}
_NAMED = {**_STRATEGIES, **_PRESETS}

FORMS = (
    "none, static:SCALE (static:1024), or a name, with options as in dynamic:growth_interval=200,initial_scale=2**16: "
    f"{', '.join(_STRATEGIES)}, or one of scaler.presets: {', '.join(_PRESETS)}"
)
"""What `parse_strategy` takes, in words."""


def parse_strategy(text: str) -> scaler.Strategy:
    """The strategy a text names.

    Args:
        text: "none", "static:1024", "dynamic" or "dynamic:growth_interval=200,initial_scale=65536", and likewise
            "headroom", "histogram", "delayed_amax", "log_normal", "smooth" and the name of any strategy in
            `scaler.presets`. A number may be written as a power: "2**-10".

    Raises:
        scaler.InvalidArgument: For another form, an unknown name, or a value the strategy refuses.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "none" and not rest:
            return scaler.NoScaling()
        if kind == "static" and rest:
            return scaler.Static(_number(rest))
        if kind in _NAMED:
            return _NAMED[kind](**_arguments(rest, _NAMED[kind]))
    except scaler.InvalidArgument as error:
        raise scaler.InvalidArgument(f"strategy {text!r}: {error}") from error
    known = ("none", "static", *_NAMED)
    # "DelayedAmax" and "log-normal" are near, too.
    spelled = "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(kind)).lower().replace("-", "_")
    hint = "" if kind in known else _nearest(spelled, known)
    raise scaler.InvalidArgument(f"strategy {text!r}: {hint}expected {FORMS}.")


def _arguments(rest: str, make: Callable[..., scaler.Strategy]) -> dict:
    parameters = inspect.signature(make).parameters
    arguments = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in parameters:
            hint = "" if name in parameters else _nearest(name, parameters)
            raise scaler.InvalidArgument(
                f"{hint}{part!r} is none of {', '.join(parameters) or 'no arguments'}, with =VALUE."
            )
        if name in arguments:
            raise scaler.InvalidArgument(f"{name} is given twice.")
        is_text = isinstance(parameters[name].default, str)
        arguments[name] = value.strip("'\"") if is_text else _number(value)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise scaler.InvalidArgument(f"{name} has no default here: add {name}=VALUE.")
    return arguments


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {found[0]!r}? " if found else ""


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
