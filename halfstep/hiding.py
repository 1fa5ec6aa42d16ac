"""Finds files of a user that hide a package of ours. It imports none of them, so it is fast and works without them."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence

_ROOT = pathlib.Path(__file__).parent.parent
_PACKAGES = ("scaler", "loops")


def hidden(packages: Sequence[str] = _PACKAGES) -> str | None:
    """A sentence that names the file that Python imports in place of one of these packages of ours, or None."""
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ValueError:  # A module that somebody made by hand.
            continue
        if spec is not None and spec.origin is not None and _hides(package, pathlib.Path(spec.origin)):
            return _sentence(package, spec.origin)
    return None


def hiding_files(folder: pathlib.Path) -> list[dict[str, str]]:
    """The files of a folder that hide a package of ours from programs that start there.

    Returns:
        For each file its `package`, its `file`, and `advice`, a sentence.
    """
    found = []
    for package in (*_PACKAGES, "halfstep"):
        for place in (folder / package / "__init__.py", folder / f"{package}.py"):
            if place.is_file() and _hides(package, place):
                found.append({"package": package, "file": str(place), "advice": _sentence(package, place)})
    return found


def _hides(package: str, place: pathlib.Path) -> bool:
    """Whether a file is another module than our package, in a place where that can be known."""
    ours = _ROOT / package / "__init__.py"
    if not (place.is_file() and ours.is_file()) or os.path.samefile(place, ours):
        return False
    # Another copy of Halfstep has all of its packages side by side.
    siblings = (*_PACKAGES, "halfstep")
    return not all((place.parent.parent / one / "__init__.py").is_file() for one in siblings)


def _sentence(package: str, place: object) -> str:
    return (
        f"{place} hides the package {package!r} of Halfstep: a program that starts in its folder imports it in place "
        "of the package. Give it another name."
    )
