"""What else lies in a run's folder: what the run says of itself, and what was replayed of it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from loops.errors import CheckpointError
from loops.json_values import read_json
from loops.resume.describe import describe
from loops.runs.run import CHECKPOINTS, SUMMARY

REPLAY = "replay.json"
"""What `halfstep replay --json` printed of the run, where somebody kept it."""


def facts_of(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run's summary or else its checkpoints say of it, and the versions that it ran with; empty if nothing."""
    try:
        said = read_json((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = {}
    said = said if isinstance(said, dict) else {}
    settings = said.get("digest_depends_on")
    if isinstance(settings, dict):
        return said, settings
    try:
        saved = describe(folder, CHECKPOINTS)
    except (CheckpointError, OSError):
        return said, {}
    run = saved["identity"].get("run")
    of_loop = {name: saved["identity"][name] for name in ("optimizer", "batches") if name in saved["identity"]}
    return {**of_loop, **(run if isinstance(run, dict) else {}), **said}, dict(saved["versions"])


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
