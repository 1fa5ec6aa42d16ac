"""Times two functions interleaved, since a machine is slower in one minute than in the next."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from loops.diagnose.doctor.program import Program
from loops.step.train_step import TrainStep
from loops.support.errors import OutOfData

_WARM_UP = 2
_FEWEST, _MOST = 9, 400
_LONGEST, _FEWEST_OF_LONG = 60.0, 3
"""The seconds after which fewer rounds are enough, and how many."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of two or more values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass(frozen=True)
class PairedTiming:
    """The times of two functions that were called alternately.

    Attributes:
        before: The milliseconds of the first.
        after: The milliseconds of the second.
        ratio: The time of the second over the first, within each round.
    """

    before: Spread
    after: Spread
    ratio: Spread

    def of_one(self, count: int) -> PairedTiming:
        """The times per step, if each call took `count` steps."""
        before, after = (
            Spread(one.median / count, one.low / count, one.high / count) for one in (self.before, self.after)
        )
        return PairedTiming(before, after, self.ratio)

    @property
    def verdict(self) -> str:
        """Either "faster" or "slower", if three quarters of the rounds agree, or "the same": within the noise."""
        if self.ratio.high < 1:
            return "faster"
        return "slower" if self.ratio.low > 1 else "the same"


def time_interleaved(before: Callable[[], object], after: Callable[[], object], seconds: float) -> PairedTiming:
    """Times two functions alternately; the first one leads in even rounds, the second one in odd rounds.

    Args:
        before: A function that returns when its work is finished.
        after: The second such function.
        seconds: The seconds to measure, after a warm-up. There are at least nine rounds, or three if nine take more
            than a minute.
    """
    for _ in range(_WARM_UP):
        before()
        after()
    taken: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    while _wants_more(len(taken[0]), time.perf_counter() - start, seconds):
        for place in (0, 1) if len(taken[0]) % 2 == 0 else (1, 0):
            taken[place].append(milliseconds((before, after)[place]))
    ratios = [second / first for first, second in zip(*taken, strict=True)]
    return PairedTiming(Spread.of(taken[0]), Spread.of(taken[1]), Spread.of(ratios))


def _wants_more(rounds: int, passed: float, seconds: float) -> bool:
    if rounds < (_FEWEST if passed < _LONGEST else _FEWEST_OF_LONG):
        return True
    return passed < seconds and rounds < _MOST


def milliseconds(function: Callable[[], object]) -> float:
    """The time that a function takes, in milliseconds."""
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


STEPS_A_CALL = 20
"""The number of steps in a call that takes several."""


class Running:
    """A traced step. It keeps the dtype policy and other settings with which it was traced.

    Args:
        program: The program whose batches it takes.
        step: A step of the program.
        many: Whether a call takes `STEPS_A_CALL` steps in the graph.
    """

    def __init__(self, program: Program, step: TrainStep, *, many: bool = False):
        self._batch = program.batch
        self._times = step.accumulate
        self.skipped = self.attempted = 0
        function: Any = tf.function(step, jit_compile=program.compiled or None)
        if many:
            self._times, function = 1, tf.function(_many(function))
        self._call = function.get_concrete_function(tf.nest.map_structure(tf.type_spec_from_value, program.batch))

    def __call__(self, batch: Any = None) -> None:
        """Takes a step, with all of its micro-batches."""
        for _ in range(self._times):
            outputs = self._call(self._batch if batch is None else batch)
        attempted, applied = bool(outputs["attempted"]), bool(outputs["applied"])
        tf.test.experimental.sync_devices()
        self.attempted += attempted
        self.skipped += attempted and not applied


def _many(step: Callable) -> Callable:
    def many(batch: Any) -> dict[str, tf.Tensor]:
        nothing = (tf.constant(0), tf.constant(False), tf.constant(False))

        def body(taken: tf.Tensor, *_: tf.Tensor) -> tuple:
            outputs = step(batch)
            return taken + 1, tf.convert_to_tensor(outputs["attempted"]), tf.convert_to_tensor(outputs["applied"])

        _, attempted, applied = tf.while_loop(lambda taken, *_: taken < STEPS_A_CALL, body, nothing)
        return {"attempted": attempted, "applied": applied}

    return many


@dataclasses.dataclass
class Batches:
    """Repeats the batches of a dataset, and leaves out those of another shape than the first.

    Attributes:
        dataset: The dataset of the batches.
        like: A batch of the wanted shape.
    """

    dataset: tf.data.Dataset
    like: Any

    def __post_init__(self) -> None:
        self._iterator: Iterator[Any] = iter(self.dataset)
        self._shapes = _shapes(self.like)

    def next(self) -> Any:
        """The next batch of the wanted shape.

        Raises:
            OutOfData: If there is none in the whole dataset, as in a dataset that cannot be read twice.
        """
        for _ in range(2):
            for found in self._iterator:
                batch = tuple(found)
                if _shapes(batch) == self._shapes:
                    return batch
            self._iterator = iter(self.dataset)
        raise OutOfData(
            "the dataset gave no further batch of the shape of its first one: expected one that can be read again from "
            "its beginning, such as a dataset of tensors or files."
        )


def _shapes(batch: Any) -> list:
    return [one.shape for one in tf.nest.flatten(batch)]
