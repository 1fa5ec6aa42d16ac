"""The parts of a composed step, by the names of what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np

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


def in_turn(columns: Mapping[str, np.ndarray], column: str) -> dict[str, np.ndarray]:
    """The values of one meaning, at the steps at which it was a part's turn: {"": [...]}, or {"critic": [...], ...}.

    Between its turns a part has no loss, which is NaN as one that is not finite.

    Args:
        columns: Of [steps] values each.
        column: As of `columns_of`.
    """
    every = np.array(True)
    found = {}
    for part, name in columns_of(columns, column).items():
        turn = np.asarray(columns.get(f"{part}/attempted", every)) == 1
        values = np.asarray(columns[name])
        found[part] = values[np.broadcast_to(turn, values.shape)]
    return found


def named(what: str, part: str) -> str:
    """What is of a part, in words: "loss", or "critic loss"."""
    return f"{part} {what}" if part else what


def of_part(columns: Mapping[str, _Values], part: str) -> dict[str, _Values]:
    """What is there of one part, under the names that a step of one loss gives it."""
    return {name.removeprefix(f"{part}/"): one for name, one in columns.items() if name.startswith(f"{part}/")}
