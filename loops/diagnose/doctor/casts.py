"""What the casts of a step cost: their bytes from its graph, and the time that casts of so many bytes take here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from loops.diagnose.doctor.turns import Spread, take_turns
from loops.diagnose.graph.census import Census


@dataclasses.dataclass(frozen=True)
class Casts:
    """The casts of a step.

    Attributes:
        count: How many there are.
        bytes: What they write.
        milliseconds: How long casts of so many bytes take on this machine, alone, one after the other; less what as
            many calls take that cast a single value.
    """

    count: int
    bytes: int
    milliseconds: Spread


def casts_of(census: Census, seconds: float) -> Casts | None:
    """The casts between formats; None for a step without any.

    In the step they may take less: the graph optimizer joins some, and others run beside something else.
    """
    rows = [row for row in census.rows if row.cast_bytes]
    if not rows:
        return None
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.dtype] = sizes.get(row.dtype, 0) + (row.cast_bytes or 0)
    turns = take_turns(_casting(dict.fromkeys(sizes, 1)), _casting(sizes), seconds)
    calls, whole = turns.before.median, turns.after
    spread = Spread(*(max(0.0, value - calls) for value in (whole.median, whole.low, whole.high)))
    return Casts(sum(row.count for row in rows), sum(sizes.values()), spread)


def _casting(sizes: dict[str, int]) -> Callable[[], None]:
    """Casts of so many bytes of output for each pair of dtypes, such as "float32 to float16"."""
    given = []
    for pair, size in sizes.items():
        source, target = (tf.as_dtype(name) for name in pair.split(" to "))
        given.append((tf.zeros([max(1, size // target.size)], source), target))

    def cast() -> None:
        for values, target in given:
            tf.cast(values, target)
        tf.test.experimental.sync_devices()

    return cast
