"""Which batches of a dataset a run leaves out: a file that a person can edit."""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

from loops.support.checks import is_count
from loops.support.errors import LoopError
from loops.support.json_values import read_object
from loops.support.written.place import writing

NAME = "skip_batches.json"
"""The file, in the folder of the checkpoints."""
UNDER_WAY = "rewind_under_way.json"
"""A file of the same form next to it, from the decision to go back until the run has. A person writes none."""
_EXAMPLE = '{"skip": [{"first": 4801, "last": 5100}]}'


class LeftOut(NamedTuple):
    """Batches that are left out, counted from 1 in the order of the dataset.

    Attributes:
        first: The first of them.
        last: The last.
        rewound_to: The step of the checkpoint that the run went back to for them; None if a person wrote them. It tells
            a person, and counts; nothing goes back because of it.
    """

    first: int
    last: int
    rewound_to: int | None = None


def read(folder: pathlib.Path, name: str = NAME) -> list[LeftOut]:
    """What the file says, in its order; nothing if there is none.

    Raises:
        LoopError: If it has another form.
    """
    path = folder / name
    try:
        entries = read_object(path.read_text(encoding="utf-8")).get("skip")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LoopError(f"{path}: it cannot be read ({error}): expected {_EXAMPLE}.") from error
    if not isinstance(entries, list):
        raise LoopError(f"{path}: it has no list named skip: expected {_EXAMPLE}.")
    return [_entry(path, entry) for entry in entries]


def _entry(path: pathlib.Path, entry: Any) -> LeftOut:
    first: Any
    last: Any
    back: Any
    first, last, back = (entry.get(name) if isinstance(entry, dict) else None for name in LeftOut._fields)
    if not (is_count(first) and is_count(last) and first <= last and (back is None or is_count(back))):
        raise LoopError(f"{path}: {json.dumps(entry)[:100]} is not the first and the last of some batches: {_EXAMPLE}.")
    return LeftOut(first, last, back)


def write(folder: pathlib.Path, entries: list[LeftOut], name: str = NAME) -> None:
    """Replaces the file, which is whole at any moment.

    Raises:
        NotWritable: If it cannot be written.
    """
    named = [{name: value for name, value in entry._asdict().items() if value is not None} for entry in entries]
    temporary = folder / f"{name}.tempstate0"  # A checkpoint's own leftovers, which are swept, have such names.
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in named)
    with writing("Rewind", folder / name):
        temporary.write_text(f'{{"skip": [\n{lines}\n]}}\n', encoding="utf-8")
        temporary.replace(folder / name)


def next_of(entries: list[LeftOut], taken: int) -> LeftOut | None:
    """The next batches to leave out after the first `taken` of the dataset, those that touch them included."""
    after = sorted((entry for entry in entries if entry.last > taken), key=lambda entry: entry[:2])
    if not after:
        return None
    first, last = max(after[0].first, taken + 1), after[0].last
    for entry in after[1:]:
        last = max(last, entry.last) if entry.first <= last + 1 else last
    return LeftOut(first, last)
