"""Describes a checkpoint without the model.

Several workers: the newest step for which every worker has a complete checkpoint in its own folder.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from loops.loop.state import folder
from loops.loop.workers.workers import Workers
from loops.support.errors import CheckpointError


def describe(directory: str | os.PathLike, subfolder: str = "") -> dict:
    """The newest readable checkpoint of a folder, and the steps of the others.

    Args:
        directory: A folder of checkpoints.
        subfolder: Searched if the folder itself has no checkpoints.

    Returns:
        `checkpoint`: its path; `step`; `others`: the steps of the other checkpoints, newest first; `damaged`: a reason
        for each newer checkpoint that cannot be read, by step; `bytes` on disk; `counters`: data, attempted, applied,
        skipped; `loss_scaler`: the strategy's state, if there is one; `identity`: that of the run that saved it;
        `changes`: the steps from which it went on with other settings;
        `data`: `batches` taken, the `problem` if the position could not be saved, and all `caveats`; `variables`: for
        each group `count` and `values`; `held`: the step's tables and iterators; `random`: the saved state of each kind
        of generator; `evaluations`: the newest `results` of each `Evaluate` and their `step`, by its name; `actions`:
        those with a state; `versions`.

    Raises:
        CheckpointError: If there is no checkpoint, or none that can be read.
    """
    place = pathlib.Path(directory)
    if not folder.numbers(place) and folder.numbers(place / subfolder):
        place = place / subfolder
    number, facts, damaged = folder.newest_whole(place)
    if number is None:
        reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise CheckpointError(
            f"{place}: none of its checkpoints can be read ({reasons})."
            if reasons
            else f"{place}: no checkpoint. Name the folder that was given to hs.Checkpoint, or a run's --out."
        )
    return {
        "checkpoint": folder.prefix(place, number),
        "step": number,
        "others": [other for other in folder.numbers(place) if other != number],
        "damaged": {str(step): why for step, why in damaged.items()},
        "bytes": sum(path.stat().st_size for path in place.glob(f"{folder.NAME}-{number}.*")),
        "counters": facts["counters"],
        "loss_scaler": facts.get("loss_scaler"),
        "identity": facts["identity"],
        "changes": facts.get("changes", []),
        "data": facts["data"],
        "variables": {
            group: {"count": len(variables), "values": sum(_size(shape) for _, _, shape in variables)}
            for group, variables in facts["variables"].items()
        },
        "held": facts.get("held", []),
        "random": {"seed_generators": _seed_generators(facts), **_shortened(facts["random"])},
        "evaluations": _evaluations(facts),
        "actions": sorted(facts["actions"]),
        "versions": facts["versions"],
    }


def _size(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _evaluations(facts: dict) -> dict[str, dict]:
    """The states of actions with results, such as an `Evaluate`."""
    return {
        (facts["action_keys"].get(label) or [label])[-1]: state
        for label, state in facts["actions"].items()
        if isinstance(state, dict) and isinstance(state.get("results"), dict) and state.get("step")
    }


def _seed_generators(facts: dict) -> int:
    names = [name for variables in facts["variables"].values() for name, _, _ in variables]
    return sum("seed_generator_state" in name for name in names)


def _shortened(random: dict) -> dict:
    """Short states in full; for long ones the generator's name and position."""
    short = {"python": {"generator": "MT19937", "position": random["python"][1][-1]}}
    short["numpy"] = {"generator": random["numpy"][0], "position": random["numpy"][2]}
    return {
        "tf_generator": random["tf_generator"],
        "keras_generator": random["keras_generator"],
        "op_seeds": random["op_seeds"] is not None,
        **short,
    }


def place(directory: pathlib.Path, workers: Workers) -> pathlib.Path:
    """The folder of this worker's checkpoints: the directory itself for worker 0, one inside of it for others."""
    return directory / f"worker-{workers.index}" if workers.index else directory


Found = tuple[int | None, dict[str, Any], dict[int, str]]


def newest_common(where: pathlib.Path, workers: Workers, found: Found) -> Found:
    """As `folder.newest_whole`, among the steps that all workers have. Every worker must call this.

    Workers save at the same steps and synchronize between two saves. A kill thus finds a worker at most one save ahead
    of another, and with two checkpoints each there is a common one.

    Args:
        where: This worker's folder.
        workers: All workers.
        found: What `folder.newest_whole` returned for this folder.

    Raises:
        CheckpointError: On every worker, if workers have checkpoints, but none of a common step.
    """
    number, facts, damaged = found
    while len(newest := {row[0] for row in workers.gather([number or 0])}) > 1:
        number, facts, older = folder.newest_whole(where, min(newest))
        damaged = {**damaged, **older}
    if workers.count > 1 and number is None:
        counts = [row[0] for row in workers.gather([len(folder.numbers(where))])]
        # A kill during the very first save leaves one checkpoint with some and none with others.
        if max(counts) > 1:
            has = "; ".join(f"worker {worker} has {count}" for worker, count in enumerate(counts))
            raise CheckpointError(
                f"{where}: there is no step for which every worker has a whole checkpoint ({has}). Give each worker "
                "the folder that it had, or remove the checkpoints of all to start from the beginning."
            )
    return number, facts, damaged
