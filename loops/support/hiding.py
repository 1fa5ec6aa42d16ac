"""Finds a file of the user that Python imports in place of one of our packages.

It imports nothing but Python's own modules. `loops` imports it first, since importing it looks for a hidden `scaler`.
"""

from __future__ import annotations

import importlib.util
import pathlib

_MARKS = {"scaler": '"LossScaler",', "halfstep": "`import halfstep as hs`"}
"""A text by which the `__init__.py` of each is known, also that of another copy of Halfstep."""


def check_not_hidden(package: str) -> None:
    """Checks that a package beside this one is what Python imports by its name.

    Args:
        package: "scaler" or "halfstep".

    Raises:
        ImportError: If a file hides it, or has overwritten it, with the file.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # A module that somebody made by hand.
        return
    found = pathlib.Path(spec.origin) if spec is not None and spec.origin is not None else pathlib.Path()
    if found.suffix == ".py" and found.is_file() and _MARKS[package] not in found.read_text("utf-8", "replace"):
        raise ImportError(
            f"{found} hides the package {package!r} of Halfstep: a program that starts in its folder imports it in "
            "place of the package. Give it another name. If another distribution installed it, `halfstep doctor` says "
            "what to do."
        )


check_not_hidden("scaler")
