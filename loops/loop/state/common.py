"""Several workers: the newest step for which every worker has a complete checkpoint in its own folder."""

from __future__ import annotations

import pathlib
from typing import Any

from loops.loop.state import folder
from loops.loop.workers.workers import Workers
from loops.support.errors import CheckpointError


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
