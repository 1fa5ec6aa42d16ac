"""The files of a run's folder: their names, how to find them, how to write JSON atomically; what the small ones say.

A run's metadata comes from its summary and its checkpoints.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import scaler
from loops.loop.state import folder as checkpoints
from loops.loop.state.compared import flat
from loops.record.skips import lacks_steps
from loops.record.steps import Counted
from loops.record.summary import number as scale_text
from loops.support.errors import LoopError
from loops.support.json_values import read_object, without_nan
from loops.support.written import writing

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""
STEPS, SUMMARY, TRACE = "steps.jsonl", "summary.json", "trace.arrow"
"""The other files: the log of steps, the summary at the end, and the trace."""
EVALUATIONS = "evaluations.jsonl"
"""What `evaluate_checkpoints` measured; beside a log, in a file of its own, what an `Evaluate` measured."""
EXPLANATIONS = "explanations.json"
"""What `Explain` found."""
STEPS_CSV = "steps.csv"
"""The log of a run that does not write `STEPS`."""
REPLAY = "replay.json"
"""The output of `halfstep lab replay --json`, if the user saved it."""


def check_run(run: str | os.PathLike, *, or_file: bool = False, hint: str = "") -> pathlib.Path:
    """The folder of a run.

    Args:
        run: A path from the user.
        or_file: Whether a file of the run is also accepted.
        hint: The end of the error message.

    Raises:
        scaler.InvalidArgument: If it does not exist.
    """
    place = pathlib.Path(run)
    if not (place.exists() if or_file else place.is_dir()):
        raise scaler.InvalidArgument(
            f"{run}: no such folder: expected a run's --out, or that of a program's actions{hint}."
        )
    return place


def trace_of(place: pathlib.Path) -> pathlib.Path | None:
    """The trace in a run's folder, or None.

    Raises:
        LoopError: If there are several, and none has the default name.
    """
    return _one(place, TRACE, "*.arrow")


def log_of(place: pathlib.Path) -> pathlib.Path | None:
    """The log of steps in a run's folder, or None.

    Raises:
        LoopError: If there are several, and none has the default name.
    """
    return _one(place, STEPS, "*.jsonl") or _one(place, STEPS_CSV, "*.csv")


def _one(folder: pathlib.Path, usual: str, pattern: str) -> pathlib.Path | None:
    if (folder / usual).is_file():
        return folder / usual
    found = sorted(path for path in folder.glob(pattern) if path.is_file() and not path.name.endswith(EVALUATIONS))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise LoopError(f"{folder}: which file is the run's: {names}? Name one of them instead of the folder.")
    return found[0] if found else None


def read_summary(folder: pathlib.Path) -> dict[str, Any] | None:
    """The summary that a run writes at its end; None if it does not exist or cannot be read."""
    try:
        return read_object((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def to_json(value: dict) -> str:
    """The value as JSON, with null for NaN and infinities, which JSON does not have."""
    return json.dumps(without_nan(value), indent=2, allow_nan=False)


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes JSON under a temporary name and renames it, so that the file is complete or absent.

    Raises:
        NotWritable: If it cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with writing("the result", path):
            temporary.write_text(to_json(value) + "\n", encoding="utf-8")
            temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class RunMetadata(NamedTuple):
    """A run's metadata.

    Attributes:
        facts: Its task, its options and so on; empty if unknown.
        versions: The versions of the libraries it ran with, by name; empty if unknown.
    """

    facts: dict[str, Any]
    versions: dict[str, Any]


def metadata_of(folder: pathlib.Path) -> RunMetadata:
    """The metadata in a run's summary, completed from its newest readable checkpoint.

    The summary has precedence. A new run in the same folder removes the old summary, but may leave old checkpoints.
    """
    summary = read_summary(folder) or {}
    versions = summary.get("digest_depends_on")
    number, saved = checkpoints.newest_facts(checkpoints_of(folder))
    if number is None:
        return RunMetadata(summary, versions if isinstance(versions, dict) else {})
    identity = saved["identity"]
    run = identity["run"] if isinstance(identity.get("run"), dict) else {}
    if isinstance(versions, dict):
        # The checkpoints may be those of another run.
        its_own = all(summary.get(name, value) == value for name, value in run.items())
        settings = {name: identity[name] for name in _SETTINGS if name in identity and its_own}
        return RunMetadata({**settings, **summary}, versions)
    of_loop = {name: identity[name] for name in ("replicas", "workers", *_SETTINGS) if name in identity}
    strategy = {"strategy": text} if (text := _strategy_of(saved)) else {}
    return RunMetadata({**strategy, **run, **of_loop, **summary}, dict(saved["versions"]))


def _strategy_of(saved: Mapping[str, Any]) -> str:
    """The strategies of a checkpoint's loss scalers, each once; "" for none."""
    found = flat({**saved.get("settings", {}), **saved["identity"], "run": {}})
    texts = {name: text for name, text in found.items() if isinstance(text, str)}
    return "; ".join({_short(text): None for name, text in texts.items() if re.search("strategy$|^PerLoss", name)})


def _short(text: str) -> str:
    """A strategy's `repr` without the values that are defaults, and with scales as powers of two."""
    try:
        tree = ast.parse(text, mode="eval")
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            made = getattr(scaler.strategies, ast.unparse(call.func), None)
            fields = dataclasses.fields(made) if dataclasses.is_dataclass(made) else ()
            defaults = {field.name: repr(field.default) for field in fields}
            call.keywords = [one for one in call.keywords if ast.unparse(one.value) != defaults.get(one.arg or "")]
        return re.sub(r"(scale=)(\d[\d.e+-]*)", lambda at: at[1] + scale_text(float(at[2])), ast.unparse(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # A strategy's own text, or a damaged file.
        return text


def counted_in(folder: pathlib.Path, steps: Sequence[int]) -> Counted | None:
    """What a run counted up to its newest checkpoint, for a log that lacks steps; None if no checkpoint says it.

    Args:
        folder: The run's folder, or that of its checkpoints.
        steps: The steps in its log, in order.
    """
    if not lacks_steps(steps):
        return None
    place = checkpoints_of(folder)
    # A checkpoint that is later than the next line would be may be that of an earlier run.
    end = steps[-1] + max(later - one for one, later in pairwise([0, *steps]))
    for number in checkpoints.numbers(place):
        if number < end:
            with contextlib.suppress(checkpoints.Damaged):
                counters = checkpoints.read_facts(checkpoints.prefix(place, number), whole=False)["counters"]
                # A step that does not say what it decided is not counted.
                return Counted(counters["data"], counters["skipped"]) if counters["attempted"] else None
    return None


def checkpoints_of(folder: pathlib.Path) -> pathlib.Path:
    """The folder of a run's checkpoints: the run's folder itself, or the usual one in it."""
    return folder if checkpoints.numbers(folder) else folder / CHECKPOINTS


def is_complete(where: pathlib.Path) -> bool:
    """Whether the newest checkpoint is the last one of a run, and no process holds the run's lock to go on.

    Between two calls of `Loop.run` a program seems complete for a moment: look twice.
    """
    return not (where / ".lock").exists() and checkpoints.newest_facts(where)[1].get("complete", False)


_SETTINGS = ("optimizer", "batches", "accumulate")
"""What a checkpoint's identity adds to the options of its run."""


def replayed_in(folder: pathlib.Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """The saved results of a replay, one mapping per strategy. A file of another kind is noted, and ignored."""
    try:
        rows = read_object((folder / REPLAY).read_text(encoding="utf-8"))["strategies"]
        if all(isinstance(row["strategy"], str) for row in rows):
            return tuple(rows)
    except (OSError, UnicodeDecodeError):
        return ()
    except (ValueError, KeyError, TypeError):
        pass
    notes.append(f"{REPLAY} is not the output of halfstep lab replay --json, and was ignored.")
    return ()
