"""The parts of a composed step, by the names of what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

_Values = TypeVar("_Values")


def part_names(names: Iterable[str]) -> list[str]:
    """The parts of which a step returns a loss and whether it was applied, such as "critic"; none for a single loss.

    Args:
        names: Of outputs or columns, such as "critic/loss".
    """
    known = list(names)
    found = [name.removesuffix("/loss") for name in known if name.endswith("/loss")]
    return [part for part in found if f"{part}/applied" in known]


def columns_of(names: Iterable[str], column: str) -> dict[str, str]:
    """The outputs or columns of one meaning, such as all losses: {"": "loss"}, or {"critic": "critic/loss", ...}.

    An output that merely ends in the same word, such as "extra/loss" without "extra/applied", is none of them.

    Args:
        names: Of outputs or columns.
        column: The name that a step of one loss gives it: "loss", "loss_scale", "applied", "grad_norm" and others.

    Returns:
        The names by whose they are: "" for the step itself, which comes first, or the name of a part.
    """
    known = list(names)
    every = {"": column} | {part: f"{part}/{column}" for part in part_names(known)}
    return {part: name for part, name in every.items() if name in known}


def of_part(columns: Mapping[str, _Values], part: str) -> dict[str, _Values]:
    """What is there of one part, under the names that a step of one loss gives it."""
    return {name.removeprefix(f"{part}/"): one for name, one in columns.items() if name.startswith(f"{part}/")}
