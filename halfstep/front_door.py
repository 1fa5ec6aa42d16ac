"""What `halfstep` does when a name is asked for: which package has it, and whether a file hides that package."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import pathlib
import re
from collections.abc import Mapping, Sequence

from halfstep.hiding import hidden

_NEAR = 0.8
"""How alike a name must be to be suggested, of 1."""
_PACKAGES = ("scaler", "loops")
"""Those whose names `halfstep` has. Of a name that both have, the last one counts."""
_OWN = {"loops": "loops", "observe": "halfstep.observe", "scaler": "scaler"}


@functools.cache
def owners() -> Mapping[str, str]:
    """All names, each with its package, or with the module that it is."""
    return {**{name: package for package in _PACKAGES for name in _names_of(package)}, **_OWN}


def check_not_hidden(packages: Sequence[str] = _PACKAGES) -> None:
    """Checks that packages of ours can be imported.

    Raises:
        ImportError: If a file hides one or has overwritten it.
    """
    hiding = hidden(packages)
    if hiding:
        raise ImportError(hiding)


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


def _names_of(package: str) -> list[str]:
    """The public names of a package. Its text is read, which is fast; in an archive there is none."""
    try:
        text = (pathlib.Path(__file__).parent.parent / package / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return list(getattr(importlib.import_module(package), "__all__", ()))
    return re.findall(r'"(\w+)"', text.partition("\n__all__ = [")[2].partition("\n]")[0])
