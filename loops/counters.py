"""What a loop counts."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Counters:
    """Counts since the loop was made.

    Attributes:
        data: Batches taken from the dataset: calls of the train step. `Loop.run` counts in these.
        attempted: Steps on which a decision was taken: fewer than `data` where gradients are accumulated.
        applied: Attempted steps that moved the weights.
    """

    data: int = 0
    attempted: int = 0
    applied: int = 0

    @property
    def skipped(self) -> int:
        """Attempted steps that changed nothing, because a gradient was not finite."""
        return self.attempted - self.applied

    def add(self, outputs: dict[str, np.ndarray], steps: int) -> None:
        """Counts `steps` calls of a train step by their outputs.

        A step that reports no `attempted` is taken to have decided, and one that reports no `applied` to have
        applied.
        """
        attempted = int(np.sum(outputs["attempted"])) if "attempted" in outputs else steps
        self.data += steps
        self.attempted += attempted
        self.applied += int(np.sum(outputs["applied"])) if "applied" in outputs else attempted
