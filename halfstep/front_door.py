"""Which package has a name of `halfstep`, and whether a file hides that package: without importing any of them."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

_ROOT = pathlib.Path(__file__).parent.parent
_PACKAGES = ("scaler", "loops")
"""Those whose names `halfstep` has. Of a name that both have, the last one counts."""
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


_NEAR = 0.8
"""How alike a name must be to be suggested, of 1."""
_OWN = {"loops": "loops", "observe": "halfstep.observe", "scaler": "scaler"}


@functools.cache
def owners() -> Mapping[str, str]:
    """All names, each with its package, or with the module that it is."""
    return {**{name: package for package in _PACKAGES for name in names_of(package)}, **_OWN}


def check_not_hidden(packages: Sequence[str] = _PACKAGES) -> None:
    """Checks that packages of ours can be imported.

    Raises:
        ImportError: If a file hides one or has overwritten it.
    """
    if hides := hidden(packages):
        raise ImportError(hides)


def imported(name: str, owner: str) -> object:
    """The object of a name of `owners`. Raises as `check_not_hidden`."""
    check_not_hidden(("scaler",) if owner == "scaler" else _PACKAGES)
    module = importlib.import_module(owner)
    return module if name in _OWN else getattr(module, name)


def missing(name: str) -> AttributeError:
    """The error for what is no name, with the one that is nearest to it.

    Raises:
        ImportError: As `check_not_hidden`: the name may be one of a package that is hidden.
    """
    # Python asks for a module of ours in this way, too, before it imports it.
    if importlib.util.find_spec(f"halfstep.{name}") is None:
        check_not_hidden()
    near = {one.lower(): one for one in owners()}
    found = difflib.get_close_matches(name.lower().strip("_"), near, n=1, cutoff=_NEAR)
    end = f": is it hs.{near[found[0]]}?" if found and not name.startswith("_") else ""
    return AttributeError(f"module 'halfstep' has no attribute {name!r}{end}")


def names_of(package: str) -> list[str]:
    """The public names of a package. Its text is read, which is fast; in an archive there is none."""
    try:
        text = _ROOT.joinpath(*package.split("."), "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return list(getattr(importlib.import_module(package), "__all__", ()))
    return re.findall(r'"(\w+)"', text.partition("\n__all__ = [")[2].partition("\n]")[0])
