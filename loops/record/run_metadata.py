"""What a run says of itself, and what was replayed of it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from loops.loop.state import folder as checkpoints
from loops.record.files import CHECKPOINTS, REPLAY, read_summary
from loops.support.json_values import read_json


class Said(NamedTuple):
    """What a run says of itself.

    Attributes:
        facts: Its task, its options and so on; empty if nothing says it.
        versions: Of what it ran with, by name; empty if nothing says it.
    """

    facts: dict[str, Any]
    versions: dict[str, Any]


def said_of(folder: pathlib.Path) -> Said:
    """What a run's summary says of it, and of what is missing there what its newest readable checkpoint says.

    A run that begins removes the summary of the one before, and may leave its checkpoints.
    """
    summary = read_summary(folder) or {}
    versions = summary.get("digest_depends_on")
    saved = _newest_facts(folder)
    if saved is None:
        return Said(summary, versions if isinstance(versions, dict) else {})
    identity = saved["identity"]
    run = identity["run"] if isinstance(identity.get("run"), dict) else {}
    if isinstance(versions, dict):
        # The checkpoints may be those of another run.
        its_own = all(summary.get(name, value) == value for name, value in run.items())
        settings = {name: identity[name] for name in _SETTINGS if name in identity and its_own}
        return Said({**settings, **summary}, versions)
    of_loop = {name: identity[name] for name in ("replicas", "workers", *_SETTINGS) if name in identity}
    return Said({**run, **of_loop, **summary}, dict(saved["versions"]))


_SETTINGS = ("optimizer", "batches")
"""What a checkpoint says of the steps beside the options of its run."""


def _newest_facts(folder: pathlib.Path) -> dict[str, Any] | None:
    """Of a checkpoint that is there: its values are not read, which takes as long as they are large."""
    place = folder if checkpoints.numbers(folder) else folder / CHECKPOINTS
    for number in checkpoints.numbers(place):
        try:
            return checkpoints.read_facts(checkpoints.prefix(place, number), whole=False)
        except checkpoints.Damaged:
            continue
    return None


def replayed_in(folder: pathlib.Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """What was kept of a replay, a mapping for each strategy; what is none is noted."""
    try:
        text = (folder / REPLAY).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ()
    try:
        rows = read_json(text)["strategies"]
        if all(isinstance(row["strategy"], str) for row in rows):
            return tuple(rows)
    except (ValueError, KeyError, TypeError):
        pass
    notes.append(f"{REPLAY} is not what halfstep replay --json prints, and was passed over.")
    return ()
