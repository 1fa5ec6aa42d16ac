"""Parses strategies from text, for the command line."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
_AROUND: dict[str, Callable[..., scaler.Strategy]] = {
    "bounded": scaler.strategies.Bounded,
    "rising_floor": scaler.strategies.RisingFloor,
    "spike_guard": scaler.SpikeGuard,
    "warmup": scaler.strategies.Warmup,
}
_THEN = "then"
FORMS = (
    "none, static:SCALE (static:1024), or a name, with options as in dynamic:growth_interval=200,initial_scale=2**16: "
    f"{', '.join(_STRATEGIES)}, or one of hs.presets: {', '.join(_PRESETS)}; around any of them "
    "warmup:STEPS+, bounded:MIN,MAX+ or rising_floor:STEP=FLOOR,STEP=FLOOR+ (warmup:100+dynamic); around them all "
    "spike_guard+ (spike_guard:factor=20+dynamic); one after the other with +then:STEP+ (static:1024+then:500+dynamic)"
)
"""What `parse_strategy` takes, in words."""


def parse_strategy(text: str) -> scaler.Strategy:
    """Parses a strategy.

    Args:
        text: "none", "static:1024", "dynamic" or "dynamic:growth_interval=200,initial_scale=65536"; "headroom",
            "histogram", "delayed_amax", "log_normal", "smooth" and the names of `scaler.presets` take options in the
            same way. A number may be written as a power: "2**-10".

            Wrappers come before the strategy that they wrap, the outermost first: "warmup:100+dynamic",
            "bounded:1,2**20+warmup:100,initial_scale=8+headroom", "rising_floor:1000=8,5000=2**15+dynamic". They take
            their arguments in order, or by name.

            "static:1024+then:500+dynamic" is `Scheduled({0: Static(1024.0), 500: Dynamic()})`.

    Raises:
        scaler.InvalidArgument: For another form, an unknown name, or a value that the strategy refuses.
    """
    if len(text) > _LONGEST:
        raise scaler.InvalidArgument(f"strategy {text[:40]!r}...: {len(text)} characters: expected at most {_LONGEST}.")
    try:
        return _scheduled(_SEPARATOR.split(text))
    except scaler.InvalidArgument as error:
        raise scaler.InvalidArgument(f"strategy {text!r}: {error}") from error


_LONGEST = 1000
"""Strategies that lie in each other are made one in the other, and Python's stack is not endless."""
_SEPARATOR = re.compile(r"\+(?=[A-Za-z_])")
"""A plus before a name; not that of a number, as in 1e+3."""


def _scheduled(parts: Sequence[str]) -> scaler.Strategy:
    """The strategy of a text that was split at plus signs."""
    starts, pieces = [0], [list[str]()]
    for part in parts:
        kind, _, rest = part.partition(":")
        if kind != _THEN:
            pieces[-1].append(part)
            continue
        step = _number(rest)
        if isinstance(step, bool) or not isinstance(step, int) or step <= starts[-1]:
            raise scaler.InvalidArgument(f"{part!r}: expected then:STEP with increasing integers, as in then:500.")
        starts.append(step)
        pieces.append([])
    strategies = [_wrapped(piece) for piece in pieces]
    return scaler.strategies.Scheduled(dict(zip(starts, strategies, strict=True))) if len(pieces) > 1 else strategies[0]


def _wrapped(parts: Sequence[str]) -> scaler.Strategy:
    """The strategy of the last part, wrapped in those before it, the outermost first."""
    if not parts:
        raise scaler.InvalidArgument("then:STEP goes between two strategies, as in static:1024+then:500+dynamic.")
    strategy = _named(parts[-1])
    for part in reversed(parts[:-1]):
        kind, _, rest = part.partition(":")
        if kind not in _AROUND:
            hint = _nearest(_spelled(kind), _AROUND)
            raise scaler.InvalidArgument(
                f"{hint}{part!r} does not go around another strategy: expected one of {', '.join(_AROUND)} before a +."
            )
        try:
            if kind == "rising_floor":
                strategy = scaler.strategies.RisingFloor(strategy, **_floors(rest))
            else:
                strategy = _AROUND[kind](strategy, **_arguments(rest, _AROUND[kind], after=1))
        except scaler.InvalidArgument as error:
            raise scaler.InvalidArgument(f"{kind}: {error}") from error
    return strategy


def _named(text: str) -> scaler.Strategy:
    """The strategy of a text without plus signs."""
    kind, _, rest = text.partition(":")
    if kind == "none" and not rest:
        return scaler.NoScaling()
    if kind == "static" and rest:
        return scaler.Static(_number(rest))
    if kind in _NAMED:
        return _NAMED[kind](**_arguments(rest, _NAMED[kind]))
    if kind in _AROUND:
        raise scaler.InvalidArgument(f"{kind} goes around another strategy: add one, as in {text.rstrip('+')}+dynamic.")
    known = ("none", "static", *_NAMED, *_AROUND)
    hint = "" if kind in known else _nearest(_spelled(kind), known)
    raise scaler.InvalidArgument(f"{hint}expected {FORMS}.")


def _floors(rest: str) -> dict:
    """The argument of a `RisingFloor` from STEP=FLOOR,...; empty for its default."""
    pairs = [part.partition("=") for part in filter(None, rest.split(","))]
    if any(not equals for _, equals, _ in pairs):
        raise scaler.InvalidArgument(f"{rest!r}: expected STEP=FLOOR,..., as in rising_floor:1000=8,5000=2**15.")
    return {"floors": tuple((_number(step), _number(floor)) for step, _, floor in pairs)} if pairs else {}


def _arguments(rest: str, make: Callable[..., scaler.Strategy], after: int | None = None) -> dict:
    """The arguments in a text, by name. Values without a name are for the parameters from position `after` on."""
    parameters = dict(list(inspect.signature(make).parameters.items())[after or 0 :])
    arguments: dict = {}
    for position, part in enumerate(filter(None, rest.split(","))):
        name, equals, value = part.partition("=")
        if after and not equals and position == len(arguments) and position < len(parameters):
            name, equals, value = list(parameters)[position], "=", part
        if not equals or name not in parameters:
            hint = "" if name in parameters else _nearest(name, parameters)
            expected = f"one of {', '.join(parameters)}, with =VALUE" if parameters else "no arguments"
            raise scaler.InvalidArgument(f"{hint}{part!r}: expected {expected}.")
        if name in arguments:
            raise scaler.InvalidArgument(f"{name} is given twice.")
        # Python keeps the text of an annotation.
        may_be_text = str(parameters[name].annotation).startswith("str") and value != "None"
        is_text = isinstance(parameters[name].default, str) or may_be_text
        arguments[name] = value.strip("'\"") if is_text else _number(value)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise scaler.InvalidArgument(f"{name} has no default here: add {name}=VALUE.")
    return arguments


def _spelled(kind: str) -> str:
    """A name in the spelling used here, so that "DelayedAmax" and "log-normal" also get a hint."""
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(kind)).lower().replace("-", "_")


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {found[0]!r}? " if found else ""


def _number(value: str) -> Any:
    """A number, True or False; the strategy checks it."""
    base, power, exponent = value.partition("**")
    try:
        parts = [ast.literal_eval(part) for part in ((base, exponent) if power else (base,))]
        # As floats: a huge power of integers would take forever to compute.
        if not power:
            return parts[0]
        result = math.pow(*map(float, parts))
        return int(result) if all(isinstance(part, int) for part in parts) and result >= 1 else result
    except (ValueError, SyntaxError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise scaler.InvalidArgument(f"{value!r} is not a number.") from error
