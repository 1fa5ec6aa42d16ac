"""A smallest set that is needed, by Zeller's ddmin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def minimal(items: Sequence[_Item], passes: Callable[[list[_Item]], bool]) -> list[_Item] | None:
    """Finds a minimal set that passes: without any one of its items it does not.

    Args:
        items: The candidates.
        passes: Whether a set passes; called once for each set.

    Returns:
        The set, in the order of `items`; None if not even all of them together pass.
    """
    known: dict[frozenset[int], bool] = {}

    def asked(chosen: list[int]) -> bool:
        key = frozenset(chosen)
        if key not in known:
            known[key] = passes([items[place] for place in sorted(chosen)])
        return known[key]

    if asked([]):
        return []
    chosen = list(range(len(items)))
    if not asked(chosen):
        return None
    parts = 2
    while len(chosen) > 1:
        size = -(-len(chosen) // parts)
        pieces = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        rests = [[one for one in chosen if one not in piece] for piece in pieces]
        smaller = next((one for one in (*pieces, *rests) if len(one) < len(chosen) and asked(one)), None)
        if smaller is not None:
            parts = 2 if smaller in pieces else max(parts - 1, 2)
            chosen = smaller
        elif parts >= len(chosen):
            break
        else:
            parts = min(2 * parts, len(chosen))
    return [items[place] for place in sorted(chosen)]
