"""What `Explain` found in a run, in a file next to its log."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

from loops.record.files import EXPLANATIONS, write_json
from loops.record.lines import StepLines
from loops.support.json_values import read_object
from loops.support.written import writing


class Explanations:
    """The file `explanations.json`: `{"explanations": [{"step": 3, "sentence": "...", ...}, ...]}`.

    Args:
        path: The file.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._found: list[dict[str, Any]] = []

    @classmethod
    def beside(cls, actions: Iterable[Any]) -> Explanations | None:
        """The file next to the log that one of these actions writes; None if none writes one."""
        paths = [action.path for action in actions if isinstance(action, StepLines)]
        return cls(paths[0].absolute().parent / EXPLANATIONS) if paths else None

    def go_on(self, step: int) -> None:
        """Keeps the explanations of steps up to this one, and removes the file if there are none.

        Raises:
            NotWritable: If the file cannot be written or removed.
        """
        found = self._found or _read(self._path)
        self._found = [one for one in found if one["step"] <= step]
        if self._found:
            write_json(self._path, {"explanations": self._found})
        else:
            with writing("Explain", self._path):
                self._path.unlink(missing_ok=True)

    def add(self, explanation: dict[str, Any]) -> None:
        """Adds an explanation.

        Raises:
            NotWritable: If the file cannot be written.
        """
        self._found.append(explanation)
        write_json(self._path, {"explanations": self._found})


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        found = read_object(path.read_text(encoding="utf-8")).get("explanations")
    except (OSError, ValueError):
        return []
    rows = found if isinstance(found, list) else []
    return [one for one in rows if isinstance(one, dict) and isinstance(one.get("step"), int)]
