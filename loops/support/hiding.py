"""Finds a file of the user that Python imports in place of one of our packages.

It imports nothing but Python's own modules. `loops` imports it first, since importing it looks for a hidden `scaler`.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib

_ROOT = pathlib.Path(__file__).parents[2]


def check_not_hidden(package: str) -> None:
    """Checks that a package beside this one is what Python imports by its name.

    Args:
        package: "scaler" or "halfstep".

    Raises:
        ImportError: If a file of the user hides it, with the file.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # A module that somebody made by hand.
        return
    found = pathlib.Path(spec.origin) if spec is not None and spec.origin is not None else None
    ours = _ROOT / package / "__init__.py"
    if found is None or not (found.is_file() and ours.is_file()) or os.path.samefile(found, ours):
        return
    # Another copy of Halfstep has its packages side by side.
    if not (found.parent.parent / "loops" / "__init__.py").is_file():
        raise ImportError(
            f"{found} hides the package {package!r} of Halfstep: a program that starts in its folder imports it in "
            "place of the package. Give it another name."
        )


check_not_hidden("scaler")
