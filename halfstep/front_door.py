"""What `halfstep` does when a name is asked for: whether a file hides its package, and where else a name is."""

from __future__ import annotations

import contextlib
import pathlib

from halfstep.hiding import hidden


def check_not_hidden(package: str) -> None:
    """Checks that a package of ours can be imported.

    Raises:
        ImportError: If a file of the user hides it, or `scaler`, which both need.
    """
    hiding = hidden(("scaler", package))
    if hiding:
        raise ImportError(hiding)


def elsewhere(name: str) -> str:
    """Where a public name of `scaler` or `loops` is, as the end of a sentence; read from their text, which is fast."""
    folder, found = pathlib.Path(__file__).parent.parent, []
    for owner in ("scaler", "loops"):
        with contextlib.suppress(OSError):  # As in an archive.
            text = (folder / owner / "__init__.py").read_text(encoding="utf-8")
            names = text.partition("\n__all__ = [")[2].partition("\n]")[0]
            if f'\n    "{name}",' in names:
                found.append(f"hs.{owner}.{name}")
    return f": it is {' or '.join(found)}" if found else ""
