"""Strategies written as text, for the command line."""

from __future__ import annotations

import ast
import dataclasses

import scaler

_FORMS = "none, static:SCALE (static:1024), dynamic, or dynamic:NAME=VALUE,... (dynamic:growth_interval=200)"


def parse_strategy(text: str) -> scaler.Strategy:
    """The strategy a text names.

    Args:
        text: "none", "static:1024", "dynamic" or "dynamic:growth_interval=200,initial_scale=65536". A number may be
            written as a power: "2**-10".

    Raises:
        scaler.InvalidArgument: For another form, an unknown name, or a value the strategy refuses.
    """
    kind, _, rest = text.partition(":")
    if kind == "none" and not rest:
        return scaler.NoScaling()
    if kind == "static" and rest:
        return scaler.Static(float(_number(text, rest)))
    if kind == "dynamic":
        return scaler.Dynamic(**_arguments(text, rest))
    raise scaler.InvalidArgument(f"strategy {text!r}: expected {_FORMS}.")


def _arguments(text: str, rest: str) -> dict:
    names = [field.name for field in dataclasses.fields(scaler.Dynamic)]
    arguments = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in names:
            raise scaler.InvalidArgument(f"strategy {text!r}: {part!r} is none of {', '.join(names)}, with =VALUE.")
        arguments[name] = _number(text, value)
    return arguments


def _number(text: str, value: str):
    base, power, exponent = value.partition("**")
    try:
        number = ast.literal_eval(base)
        return number ** ast.literal_eval(exponent) if power else number
    except (ValueError, SyntaxError, TypeError, OverflowError, ZeroDivisionError) as error:
        raise scaler.InvalidArgument(f"strategy {text!r}: {value!r} is no number.") from error
