"""The algebra of units: which powers of which loss scales are factors of a tensor.

A scaled loss has the unit S, the scale of its scaler, and what does not depend on a scale the unit 1. A product
multiplies units. A sum of different units has none: it is `Mixed`. What is not known is `Unknown`, and
no step is called wrong for it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Special(enum.Enum):
    """Units that are no power."""

    ZERO = enum.auto()
    """Of zeros, which fit every unit."""
    GUARD = enum.auto()
    """Of constants that only avoid a division by zero or an overflow. They do not count in sums and limits."""


class Source(NamedTuple):
    """A mark that a tensor comes from: where a scale multiplied something, or `unscale` divided it.

    Attributes:
        mark: A reference to the marked tensor.
        owner: Whose scale multiplied; None if none did.
        operation: What made it; the call or the loop, if it was made inside of a function. None in eager mode.
        power: Its exponent, if a scale multiplied.
    """

    mark: Any
    owner: Any
    operation: Any
    power: float = 1.0


class Share(enum.Enum):
    """How much of what a memory held is in a tensor."""

    ALL = enum.auto()
    PART = enum.auto()
    """It times a constant."""
    CHOICE = enum.auto()
    """All or nothing of it."""


class Kept(NamedTuple):
    """A memory that a tensor comes from, as it was before the trace.

    Attributes:
        memory: The identity of its handle.
        name: What it is, in words.
        is_variable: Whether it is a variable, and no queue or table.
        share: Whether all of it went on, it times a constant, or all or nothing of it.
        is_number: Whether it is a scalar, such as a counter.
    """

    memory: int
    name: str
    is_variable: bool = True
    share: Share = Share.ALL
    is_number: bool = False


class Unknown(NamedTuple):
    """What is not known.

    Attributes:
        of: The sources and memories that it may come from, as far as they are known, and `Note.MODEL`.
    """

    of: frozenset = frozenset()


class Note(enum.Enum):
    """What else is known of a tensor, where its unit does not tell."""

    UNSCALED = enum.auto()
    """`unscale` made it, or a division by a scale."""
    CANCELLED = enum.auto()
    """A scale that was a factor is none any more."""
    MODEL = enum.auto()
    """A weight of the model is among what it is computed from."""
    DOUBTFUL = enum.auto()
    """Something from outside is a factor that has the shape of a gradient, and may be a scaled one."""
    NUMBER = enum.auto()
    """A constant is a factor that the user may mean as a loss scale."""


class Power(NamedTuple):
    """A product of powers of loss scales.

    Attributes:
        powers: Pairs of whose scale it is, and its exponent, which is not 0.
        notes: What else is known, and the sources and memories that it comes from.
    """

    powers: frozenset = frozenset()
    notes: frozenset = frozenset()


class Why(enum.Enum):
    """By what operation a tensor comes to depend on a scale otherwise than by a power of it."""

    SUM = enum.auto()
    """Of parts of different units."""
    LIMIT = enum.auto()
    """The larger or smaller of different units."""
    CHOICE = enum.auto()
    """Of different units, by a condition that does not depend on a scale."""
    SIZE = enum.auto()
    """A choice by a condition that depends on a scale."""
    CURVE = enum.auto()
    """A function that no factor passes through, such as an exponential."""


class Mixed(NamedTuple):
    """Certainly depends on a scale, and not by a power of it.

    Attributes:
        why: By what kind of operation.
        of: The powers that it had been given.
        name: The name of the operation.
    """

    why: Why
    of: frozenset = frozenset()
    name: str = ""


ONE = Power()
UNKNOWN = Unknown()
ZERO, GUARD = Special
Unit = Power | Mixed | Unknown | Special
_NOTES = frozenset(Note)


def unknown(units: Iterable[Unit]) -> Unknown:
    """What is not known, and is computed from tensors of these units."""
    found: set = set()
    for unit in units:
        found |= origins_of(unit)
        if isinstance(unit, Power) and Note.MODEL in unit.notes:
            found.add(Note.MODEL)
    return Unknown(frozenset(found))


def origins_of(unit: Unit) -> set:
    """The sources and memories that a tensor comes from. A scale that divided itself is none of them."""
    parts = unit.of if isinstance(unit, Mixed) else [unit]
    found: set = set()
    for part in parts:
        if isinstance(part, Power):
            found |= part.notes - _NOTES
        elif isinstance(part, Unknown):
            found |= part.of
    return found


def sources_of(units: Iterable[Unit]) -> list[Source]:
    """The sources that tensors come from, each once, in the order of the tensors."""
    found: dict[Source, None] = {}
    for unit in units:
        for one in origins_of(unit):
            if isinstance(one, Source):
                found[one] = None
    return list(found)


def memories_of(units: Iterable[Unit]) -> list[Kept]:
    """The memories that tensors come from."""
    return [one for unit in units for one in origins_of(unit) if isinstance(one, Kept)]


def mapped(unit: Unit, change: Callable[[frozenset], Iterable]) -> Unit:
    """The unit with other notes and origins: what `change` makes of them."""
    if isinstance(unit, Power):
        return Power(unit.powers, frozenset(change(unit.notes)))
    if isinstance(unit, Mixed):
        return unit._replace(of=frozenset([mapped(part, change) for part in unit.of]))
    return Unknown(frozenset(change(unit.of))) if isinstance(unit, Unknown) else unit


def is_plain(unit: Unit) -> bool:
    """Whether a tensor certainly does not depend on a scale."""
    return unit is ZERO or unit is GUARD or (isinstance(unit, Power) and not unit.powers)


def product(factors: Iterable[tuple[Unit, float]]) -> Unit:
    """The unit of a product of factors, each with an exponent."""
    powers: list[tuple[Power, float]] = []
    mixed: list[tuple[Mixed, float]] = []
    is_known, factors = True, list(factors)
    for unit, exponent in factors:
        if isinstance(unit, Power):
            powers.append((unit, exponent))
        elif isinstance(unit, Mixed):
            mixed.append((unit, exponent))
        elif unit is ZERO and exponent > 0:
            return ZERO
        elif unit is not GUARD:
            is_known = False
    if not is_known or len(mixed) > 1:
        return unknown([unit for unit, _ in factors])  # Two mixed factors may cancel each other.
    others = _power_of(powers)
    if not mixed:
        return others
    ((unit, exponent),) = mixed
    if unit.why is not Why.SUM:
        return unit
    # Each part of a sum is a part of its multiple.
    parts = frozenset([_power_of([(part, 1.0), (others, 1.0)]) for part in unit.of])
    return unit._replace(of=parts) if exponent == 1 else Mixed(Why.CURVE, unit.of)


def _power_of(factors: Sequence[tuple[Power, float]]) -> Power:
    powers: dict = {}
    sources: dict = {}
    notes: set = set()
    for unit, exponent in factors:
        for symbol, power in unit.powers:
            powers[symbol] = round(powers.get(symbol, 0.0) + power * exponent, 6)
        for note in unit.notes:
            if isinstance(note, Source) and note.owner is not None:
                # A derivative of what a scale divided is multiplied by that very scale.
                key = note._replace(power=1.0)
                sources[key] = round(sources.get(key, 0.0) + note.power * exponent, 6)
            else:
                notes.add(note)
    left = {symbol: power for symbol, power in powers.items() if power}
    # In the larger of two numbers there is one source or the other. The scales of both may be one value.
    stay = left if not any(sources.values()) else {}
    notes.update([one._replace(power=power or 1.0) for one, power in sources.items() if power or one.owner in stay])
    if len(left) < len(powers):
        notes.add(Note.CANCELLED)
    return Power(frozenset(left.items()), frozenset(notes))


def total(units: Iterable[Unit], why: Why, name: str = "", may_cancel: bool = True) -> Unit:
    """The unit of a sum, and of the larger or smaller of several tensors.

    Args:
        units: Those of the parts.
        why: What it is.
        name: Of the operation.
        may_cancel: Whether one part can put right what is wrong with another.
    """
    powers: list[Power] = []
    mixed: list[Mixed] = []
    others: list[Unit] = []
    empty = ZERO
    for unit in units:
        if isinstance(unit, Power):
            powers.append(unit)
        elif isinstance(unit, Mixed):
            mixed.append(unit)
        elif isinstance(unit, Unknown):
            others.append(unit)
        elif unit is GUARD:
            empty = GUARD
    if not powers and not mixed and not others:
        return empty
    if (others and (may_cancel or not (powers or mixed))) or (len(mixed) > 1 and may_cancel):
        return unknown([*powers, *mixed, *others])
    if mixed:
        return mixed[0]
    if len({unit.powers for unit in powers}) == 1:
        return _noted(powers, frozenset([Note.DOUBTFUL]).union(*map(origins_of, others)) if others else frozenset())
    doubtful = any(Note.DOUBTFUL in unit.notes and not unit.powers for unit in powers)
    return unknown(powers) if doubtful else Mixed(why, frozenset(powers), name)


def beside(units: Iterable[Unit]) -> Unit:
    """The unit of tensors side by side, as in a list. It is known only if all have the same."""
    counted = list(dict.fromkeys(unit for unit in units if unit is not ZERO and unit is not GUARD))
    powers = [unit for unit in counted if isinstance(unit, Power)]
    if len(counted) < 2:
        return counted[0] if counted else ZERO
    alike = len(powers) == len(counted) and len({unit.powers for unit in powers}) == 1
    return _noted(powers) if alike else unknown(counted)


def choice(condition: Unit, units: Sequence[Unit], name: str = "") -> Unit:
    """The unit of one of several tensors, chosen by a condition."""
    if is_plain(condition):
        return total(units, Why.CHOICE, name, may_cancel=False)
    if all(unit is ZERO for unit in units):
        return ZERO
    if any(isinstance(unit, Unknown) for unit in (condition, *units)):
        return unknown((condition, *units))
    return Mixed(Why.SIZE, _parts((condition, *units)), name)


def sign(unit: Unit) -> Unit:
    """The unit of the sign of a tensor, and of a comparison with zero."""
    if isinstance(unit, Power) and unit.powers:
        return Power(notes=frozenset(one for one in unit.notes if not isinstance(one, Source)) | {Note.CANCELLED})
    return Mixed(Why.SIZE, unit.of, unit.name) if isinstance(unit, Mixed) else unit


def curve(unit: Unit) -> Unit:
    """The unit of a function that no factor passes through."""
    if is_plain(unit):
        return unit if isinstance(unit, Power) else ONE
    return unit if isinstance(unit, Unknown) else Mixed(Why.CURVE, _parts([unit]))


def _parts(units: Iterable[Unit]) -> frozenset:
    """The powers among units, and those that others had been given."""
    return frozenset().union(*([unit] if isinstance(unit, Power) else getattr(unit, "of", ()) for unit in units))


def _noted(units: Sequence[Power], notes: frozenset = frozenset()) -> Power:
    """The power that all units are, with the notes of each and others."""
    return Power(units[0].powers, notes.union(*[unit.notes for unit in units]))
