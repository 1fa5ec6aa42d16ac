"""How far validated runs were from their replays, as files keep it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from loops.replay.tails import Tail
from loops.support.errors import LoopError
from loops.support.json_values import read_object
from loops.support.written.place import as_path

PathLike = str | os.PathLike
DIFFERENCE = "difference"
"""The key of a strategy's difference in what `halfstep replay --validate --json` prints."""


def differences_in(paths: PathLike | Sequence[PathLike]) -> list[Tail]:
    """The differences that some files keep.

    Args:
        paths: Files of what `halfstep replay --validate --json` printed.

    Raises:
        LoopError: If one cannot be read, or is something else.
    """
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    return [one for path in listed for one in _of_file(as_path("replay", "validated", path))]


def _of_file(path: pathlib.Path) -> list[Tail]:
    try:
        rows = read_object(path.read_text(encoding="utf-8"))["strategies"]
        return [_tail(row[DIFFERENCE]) for row in rows if row[DIFFERENCE] is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise LoopError(
            f"{path}: cannot read validated runs from it: {error}. Expected what halfstep replay --validate --json "
            "printed."
        ) from None


def _tail(found: Mapping[str, Any]) -> Tail:
    steps = int(found["steps"])
    if steps < 1:
        raise ValueError(f"steps is {steps}")
    # JSON has null for NaN.
    others = (float("nan") if found[name] is None else float(found[name]) for name in Tail._fields[1:])
    return Tail(steps, *others)
