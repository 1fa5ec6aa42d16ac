"""The batches that a run stored, for data that cannot be read again."""

from __future__ import annotations

from collections.abc import Set

from loops.loop.batch_files import KeptBatches
from loops.loop.loop import Loop
from loops.record.keep_batches import KeepBatches


def keeper_of(loop: Loop) -> KeepBatches | None:
    """The loop's `KeepBatches`, if it has one."""
    return next((action for action in loop.actions if isinstance(action, KeepBatches)), None)


def stored_by(loop: Loop) -> KeptBatches | None:
    """The batches that the loop's `KeepBatches` has stored; None without one."""
    keeper = keeper_of(loop)
    return KeptBatches(keeper.directory, loop.position.batch_spec) if keeper else None


def caveats_of_data(loop: Loop, caveats: list[str], from_dataset: Set[int]) -> list[str]:
    """How the data of replayed steps may differ from the run's, and what to do, one sentence per difference.

    Args:
        loop: The run's loop.
        caveats: The dataset's caveats.
        from_dataset: The replayed steps whose batches were not stored.
    """
    keeper = keeper_of(loop)
    if not caveats or (keeper and not from_dataset):
        return []
    if keeper is None:
        return [*caveats, "a loops.KeepBatches(directory) among the actions keeps the batches from now on"]
    more = f" and {len(from_dataset) - 1} later ones" if len(from_dataset) > 1 else ""
    return [
        *caveats,
        f"the batch of step {min(from_dataset)}{more} came from the dataset: {keeper.directory} holds the last "
        f"{keeper.last} of the run, and a damaged file is not used",
    ]
