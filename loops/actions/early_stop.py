"""Ends a run that no longer improves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import scaler
from loops.actions.best import Best
from loops.loop.visit import Visit
from loops.support.checks import check_count

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class EarlyStop:
    """Ends the run, as if its goal were reached, after `patience` evaluations without an improvement.

    A metric that is NaN is not an improvement. A run that resumes from a checkpoint of a stopped one stops at once.

    Args:
        best: The metric to follow.
        patience: The number of consecutive evaluations without improvement that ends the run.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, best: Best, *, patience: int = 3):
        if not isinstance(best, Best):
            raise scaler.InvalidArgument(
                f"EarlyStop({best!r}): expected an hs.Best, such as hs.Best(evaluate, 'loss')."
            )
        check_count(f"EarlyStop(patience={patience!r})", patience)
        self._best, self._patience = best, patience
        self.state_keys, self.state_of = best.state_keys, best

    @property
    def stopped(self) -> str | None:
        """Why the run should end, or None."""
        if self._best.since < self._patience:
            return None
        return f"no improvement in {self._best.since} evaluations: {self._best.describe()}"

    def begin(self, loop: Loop) -> None:
        """Before the first step: makes sure that the evaluation is one of the loop's actions.

        Raises:
            LoopError: If it is not.
        """
        self._best.check(loop, "EarlyStop")

    def __call__(self, visit: Visit) -> None:
        """Reads the newest results."""
        self._best.look()

    def save_state(self) -> dict:
        """The best result and the evaluations since, for a `Checkpoint`."""
        return self._best.save_state()

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        self._best.load_state(value)
