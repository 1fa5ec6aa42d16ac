"""The arithmetic of degrees: which power of the loss scale is a factor of a tensor.

A scaled loss has degree 1, and what does not depend on the scale has degree 0. A product adds the degrees of its
factors. A sum of different degrees has none. `None` means that the degree is not known.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence


class Special(enum.Enum):
    """Degrees that are not a number."""

    ZERO = enum.auto()
    """Of zeros, which have every degree."""
    GUARD = enum.auto()
    """Of constants that only avoid a division by zero or an overflow. They do not count in sums and limits."""
    NO_POWER = enum.auto()
    """Of what certainly depends on the scale, but not by a power of it as a factor."""


Degree = float | Special | None
Powers = Iterable[tuple[Degree, float]]
"""The factors of a product, each as a degree and an exponent."""


def is_without_scale(degree: Degree) -> bool:
    """Whether a tensor certainly does not depend on the scale."""
    return degree in (0.0, Special.ZERO, Special.GUARD)


def depends(degree: Degree) -> bool:
    """Whether a tensor certainly depends on the scale."""
    return degree is not None and not is_without_scale(degree)


def of_product(powers: Powers) -> Degree:
    """The degree of a product."""
    total, without = 0.0, 0
    powers = list(powers)
    if any(degree is Special.ZERO and exponent > 0.0 for degree, exponent in powers):
        return Special.ZERO
    for degree, exponent in powers:
        if degree is None or degree is Special.ZERO:
            return None
        if isinstance(degree, float):
            total += degree * exponent
        without += degree is Special.NO_POWER
    # Two factors without a degree may cancel each other.
    return round(total, 6) if not without else Special.NO_POWER if without == 1 else None


def of_sum(degrees: Sequence[Degree], may_cancel: bool = True) -> Degree:
    """The degree of a sum, and of the larger or smaller of several tensors.

    Args:
        degrees: Those of the parts.
        may_cancel: Whether two parts without a degree may cancel each other.
    """
    counted = [degree for degree in degrees if degree not in (Special.ZERO, Special.GUARD)]
    if not counted:
        return Special.GUARD if Special.GUARD in degrees else Special.ZERO
    if None in counted or (may_cancel and counted.count(Special.NO_POWER) > 1):
        return None
    return counted[0] if len(set(counted)) == 1 else Special.NO_POWER


def of_list(degrees: Sequence[Degree]) -> Degree:
    """The degree of tensors side by side. It is known only if all have the same."""
    counted = {degree for degree in degrees if degree not in (Special.ZERO, Special.GUARD)}
    return of_sum(degrees) if len(counted) <= 1 else None


def of_choice(condition: Degree, choices: Sequence[Degree]) -> Degree:
    """The degree of one of several tensors, chosen by a condition."""
    if is_without_scale(condition):
        return of_list(choices)
    if all(choice is Special.ZERO for choice in choices):
        return Special.ZERO
    return None if condition is None or None in choices else Special.NO_POWER


def of_comparison(degrees: Sequence[Degree]) -> Degree:
    """The degree of a comparison, which a common factor does not change."""
    return of_sign(of_sum(degrees))


def of_sign(degree: Degree) -> Degree:
    """The degree of a sign, which a factor does not change."""
    return 0.0 if isinstance(degree, float) or is_without_scale(degree) else degree


def of_curve(degree: Degree) -> Degree:
    """The degree of an exponential, or of another function that no factor passes through."""
    return 0.0 if is_without_scale(degree) else Special.NO_POWER if depends(degree) else None


def of_unknown(degrees: Sequence[Degree]) -> Degree:
    """The degree of what an operation makes of which nothing is known."""
    return 0.0 if all(map(is_without_scale, degrees)) else None
