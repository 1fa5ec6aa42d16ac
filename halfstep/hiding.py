"""Finds what Python imports in place of a package of ours, and who installed it, without importing any of it."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator, Sequence
from importlib import metadata

_ROOT = pathlib.Path(__file__).parent.parent
_PACKAGES = ("scaler", "loops")
_MARKS = {"scaler": '"LossScaler",', "loops": '"TrainStep",', "halfstep": "`import halfstep as hs`"}
"""A text by which the `__init__.py` of each package is known, also that of another copy of Halfstep."""
_CLONE = f"-e {_ROOT}" if (_ROOT / "pyproject.toml").is_file() else "halfstep"
_REPAIR = f"`pip install --force-reinstall --no-deps {_CLONE}`"


def hidden(packages: Sequence[str] = _PACKAGES) -> str | None:
    """A sentence that names what Python imports in place of one of these packages of ours, or None."""
    for package in packages:
        ours = _ROOT / package / "__init__.py"
        try:
            spec = importlib.util.find_spec(package)
        except ValueError:  # A module that somebody made by hand.
            continue
        place = pathlib.Path((spec and spec.origin) or ours)
        # Whoever overwrote a file takes it away when it is uninstalled.
        if _hides(package, place) or (place == ours and _ROOT.is_dir() and not ours.is_file()):
            return _sentence(package, place)
    return None


def hiding_files(folder: pathlib.Path) -> list[dict[str, str]]:
    """The files of a folder that hide a package of ours from programs that start there.

    Returns:
        For each file its `package`, its `file`, and `advice`, a sentence.
    """
    found = []
    for package in _MARKS:
        for place in (folder / package / "__init__.py", folder / f"{package}.py"):
            if _hides(package, place):
                found.append({"package": package, "file": str(place), "advice": _sentence(package, place)})
    return found


def namesakes() -> Iterator[dict[str, str]]:
    """Other installed distributions with a package of the same name as ours, of which Python imports only one.

    Yields:
        For each its `package`, `distribution`, `version`, `folder` and `advice`, a sentence.
    """
    for other in metadata.distributions():
        name, version, folder = other.metadata["Name"], other.version, str(other.locate_file(""))
        for package in sorted(_packages(other).intersection(_MARKS)) if name != "halfstep" else ():
            advice = (
                f"The distribution {name} {version} also installs a top-level package {package!r}. One overwrites or "
                f"hides the other: use separate environments, or run `pip uninstall {name}` and then {_REPAIR}."
            )
            yield dict(package=package, distribution=name, version=version, folder=folder, advice=advice)


def _hides(package: str, place: pathlib.Path) -> bool:
    """Whether a file is another module than our package. Of one without source text that is not known."""
    if place.suffix != ".py" or not place.is_file():
        return False
    return _MARKS[package] not in place.read_text(encoding="utf-8", errors="replace")


def _sentence(package: str, place: pathlib.Path) -> str:
    for other in namesakes():
        if other["package"] == package and place.is_relative_to(other["folder"]):
            return f"{place} is not the package {package!r} of Halfstep. {other['advice']}"
    if place.resolve() == (_ROOT / package / "__init__.py").resolve():
        return f"{place} of Halfstep is missing or was overwritten, as by another distribution: run {_REPAIR}."
    return (
        f"{place} hides the package {package!r} of Halfstep: a program that starts in its folder imports it in place "
        "of the package. Give it another name."
    )


def _packages(distribution: metadata.Distribution) -> set[str]:
    """The top-level packages of a distribution: from its metadata, or else from its files."""
    listed = (distribution.read_text("top_level.txt") or "").split()
    return set(listed or (file.parts[0] for file in distribution.files or () if len(file.parts) > 1))
