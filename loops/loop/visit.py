"""What the outer loop passes to its actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from loops.loop.counters import Counters


@dataclasses.dataclass(frozen=True)
class Visit:
    """What an action gets each time the loop visits the host.

    Attributes:
        counters: The counts after the steps reported here.
        outputs: The values of each scalar output of the train step over the steps since the last visit: arrays
            [steps].
        seconds: Wall time since `run` began.
        goal: The value of `counters.data` at which the run ends.
        vectors: The same for outputs that are not scalars: arrays [steps, ...].
    """

    counters: Counters
    outputs: Mapping[str, np.ndarray]
    seconds: float
    goal: int
    vectors: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def first(self) -> int:
        """The number of the first step reported here, counted from 1 in batches."""
        return self.counters.data - len(next(iter(self.outputs.values()))) + 1


Action = Callable[[Visit], object]
