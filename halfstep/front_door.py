"""What `halfstep` does when a name is asked for: whether a file hides its package, and where else a name is."""

from __future__ import annotations

import contextlib
import difflib
import pathlib
import re
from collections.abc import Sequence

from halfstep.hiding import hidden

_NEAR = 0.8
"""How alike a name must be to be suggested, of 1."""


def check_not_hidden(package: str) -> None:
    """Checks that a package of ours can be imported.

    Raises:
        ImportError: If a file hides it or has overwritten it, or `scaler`, which both need.
    """
    hiding = hidden(("scaler", package))
    if hiding:
        raise ImportError(hiding)


def elsewhere(name: str, lent: Sequence[str] = ()) -> str:
    """Where a public name of `scaler` or `loops` is, as the end of a sentence, or the one that is nearest to the name.

    It reads their text, which is fast.

    Args:
        name: What was asked for.
        lent: The names that `halfstep` itself has.
    """
    owners: dict[str, list[str]] = {}
    for owner in ("scaler", "loops"):
        for one in _names_of(owner):
            owners.setdefault(one, []).append(f"hs.{one}" if one in lent else f"hs.{owner}.{one}")
    if name in owners:
        return f": it is {' or '.join(owners[name])}"
    near = {one.lower(): one for one in owners}
    found = difflib.get_close_matches(name.lower().strip("_"), near, n=1, cutoff=_NEAR)
    return f": is it {' or '.join(owners[near[found[0]]])}?" if found and not name.startswith("_") else ""


def _names_of(package: str) -> list[str]:
    """The public names of a package."""
    with contextlib.suppress(OSError):  # As in an archive.
        text = (pathlib.Path(__file__).parent.parent / package / "__init__.py").read_text(encoding="utf-8")
        return re.findall(r'"(\w+)"', text.partition("\n__all__ = [")[2].partition("\n]")[0])
    return []
