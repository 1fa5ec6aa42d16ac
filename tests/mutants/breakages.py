"""Hand-made breakages of the guards: text to replace, and the test that has to go red.

`breakages/` holds them, a file for each way to fail. Each has a name and these keys:

    file        what is broken
    old, new    lines that stand in it once, and what takes their place
    test        who notices
    only        "branching" or "selecting", for a test of both modes that can notice it in one alone; then
    why         says why
"""

from __future__ import annotations

import pathlib
import sys
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = pathlib.Path(__file__).parent / "breakages"
MODES = ("branching", "selecting")


class Breakage(NamedTuple):
    """As the module says."""

    file: str
    old: str
    new: str
    test: str
    only: str = ""
    why: str = ""

    def broken(self, root: pathlib.Path) -> str | None:
        """The text of the file without the guard, or None if the old text does not stand in it exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def _read() -> dict[str, Breakage]:
    found: dict[str, Breakage] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text(encoding="utf-8")).items():
            if name in found:
                raise ValueError(f"{path.name}: a second breakage named {name}")
            found[name] = Breakage(**fields)
    return found


BREAKAGES = _read()
