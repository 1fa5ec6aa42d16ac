"""How far a replay's figures may be from those of a real run, from how far other runs were.

A replay follows the recorded run up to the first step whose skip may differ. After it the run is another one, with
other gradients, and a figure can only lie in an interval around the replayed one. Its half width is a quantile of
differences that were seen, over about as many steps:

- between the replays of one strategy on recorded runs of several seeds: from the parting on, a real run differs from
  the recorded one about as another seed's run does. Each pair of runs is one difference.
- between replays and the runs that `--validate` trained, with strategies that move their scale.

The quantile is that of split conformal prediction: of n differences the one of rank ceil((n + 1) 0.9), counted from the
smallest (Vovk, Gammerman and Shafer 2005; Angelopoulos and Bates 2021, arXiv 2107.07511, section 1). With fewer than
nine there is no such rank, and no interval. It holds for differences that are exchangeable. Pairs of runs share runs,
so that for them the rank is a rule of thumb: for figures with a normal distribution six runs hold 90% of others, and
five would hold 86%. benchmarks/replay_coverage.py measures what is held. Of two sources the wider interval counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loops.replay.recording import Lost
from loops.support.errors import LoopError
from loops.support.json_values import read_object
from loops.support.written import as_path

if TYPE_CHECKING:
    from loops.replay.results import Replayed

LEVEL = 0.9
"""The share of real runs whose figure shall lie in its interval."""
LEAST = 9
"""The fewest differences of which one has the rank."""
SEEDS = 6
"""The fewest runs whose pairs make an interval."""
_AS_FAR = 2.0
"""A difference counts if the steps over which it was seen are within this factor of those that are asked for."""
_ONE_SKIP = _ONE_OCTAVE = 1.0
"""The least half widths of skips and of the final scale. A few runs agree by chance in what one skip changes."""

Range = tuple[float, float]


class Tail(NamedTuple):
    """The figures of a run's last steps, or the difference of two runs in them.

    Attributes:
        steps: The number of these steps.
        skips: How many of them are skipped.
        octaves: The mean of log2 of their scales.
        final: Log2 of the scale after the last step.
        floor: The share of these steps at the lowest scale.
        ceiling: The share of these steps at the highest scale.
        flushed: The share of the gradients that their scales flush to zero; NaN if it is unknown.
    """

    steps: int
    skips: float
    octaves: float
    final: float
    floor: float
    ceiling: float
    flushed: float

    def apart_from(self, other: Tail) -> Tail:
        """How far two tails of equal length lie apart: each figure's absolute difference."""
        return Tail(self.steps, *(abs(one - its) for one, its in zip(self[1:], other[1:], strict=True)))


def tail_of(
    scales: np.ndarray,
    skipped: np.ndarray,
    final: float,
    bounds: tuple[float, float],
    since: int,
    lost: Lost | None = None,
) -> Tail:
    """The figures from a step on.

    Args:
        scales: Float32 [steps].
        skipped: Bool [steps].
        final: The scale after the last step.
        bounds: The lowest and the highest scale of the strategy.
        since: The index of the first step that counts, below `steps`.
        lost: What these steps flush to zero; None if it is unknown.
    """
    used = scales[since:]
    return Tail(
        len(used),
        float(skipped[since:].sum()),
        float(np.log2(used.astype(np.float64)).mean()),
        float(np.log2(final)),
        float((used == bounds[0]).mean()),
        float((used == bounds[1]).mean()),
        lost.flushed / lost.values if lost is not None and lost.values else float("nan"),
    )


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Pairs of the lowest and the highest value of each figure of a `Replayed`.

    Attributes:
        skips: Its interval.
        skip_rate: Its interval.
        mean_log2_scale: Its interval.
        final_scale: Its interval.
        flushed: Its interval; None if it is unknown.
        at_floor: Its interval; None if the strategy has a single scale.
        at_ceiling: Its interval; None if the strategy has a single scale.
    """

    skips: Range
    skip_rate: Range
    mean_log2_scale: Range
    final_scale: Range
    flushed: Range | None
    at_floor: Range | None
    at_ceiling: Range | None


def of_pairs(tails: Sequence[Tail]) -> list[Tail]:
    """How far each two of several runs are apart, in tails of equal length."""
    return [one.apart_from(other) for one, other in itertools.combinations(tails, 2)]


def as_far_behind(differences: Iterable[Tail], steps: int) -> list[Tail]:
    """Those that were seen over about as many steps; skips of fewer steps are scaled up."""
    kept = [one for one in differences if steps / _AS_FAR <= one.steps <= steps * _AS_FAR]
    return [one._replace(skips=one.skips * max(1.0, steps / one.steps)) for one in kept]


def half_widths(differences: Sequence[Tail]) -> Tail | None:
    """The quantile of each figure, or None if there are too few; NaN for a figure that one of them lacks."""
    # In whole numbers, since 0.9 has no exact float.
    rank = -(-(len(differences) + 1) * round(100 * LEVEL) // 100)
    if rank > len(differences):
        return None
    columns = list(zip(*differences, strict=True))[1:]
    found = [math.nan if any(map(math.isnan, column)) else sorted(column)[rank - 1] for column in columns]
    half = Tail(differences[0].steps, *found)
    return half._replace(skips=max(half.skips, _ONE_SKIP), final=max(half.final, _ONE_OCTAVE))


def wider(one: Tail | None, other: Tail | None) -> Tail | None:
    """The larger half width of each figure; None if there is neither."""
    if one is None or other is None:
        return other if one is None else one
    return Tail(one.steps, *(float(np.fmax(a, b)) for a, b in zip(one[1:], other[1:], strict=True)))


def around(one: Replayed, tail: Tail, half: Tail, steps: int, bounds: Range, moved: float) -> Intervals:
    """The intervals of a run's figures.

    Args:
        one: The replayed figures of the whole run.
        tail: Those behind the parting.
        half: Half widths for the tail.
        steps: The number of steps of the whole run.
        bounds: The lowest and the highest scale of the strategy.
        moved: The share of the run's gradients that belong to the tail.
    """
    part = tail.steps / steps
    before = one.skips - tail.skips
    # A skipped step moves nothing, so that the next one may be skipped as well if the scale stays.
    most = tail.steps if one.may_stall else min(math.ceil(tail.skips + half.skips), tail.steps)
    skips = (before + max(math.floor(tail.skips - half.skips), 0), before + most)
    lowest, highest = math.log2(bounds[0]), math.log2(bounds[1])
    mean = _within(one.mean_log2_scale, part * half.octaves, lowest, highest)
    final = _within(math.log2(one.final_scale), half.final, lowest, highest)
    return Intervals(
        skips=skips,
        skip_rate=(skips[0] / steps, skips[1] / steps),
        mean_log2_scale=mean,
        final_scale=(2.0 ** final[0], 2.0 ** final[1]),
        flushed=_share(one.flushed, moved * half.flushed),
        at_floor=_share(one.at_floor, part * half.floor),
        at_ceiling=_share(one.at_ceiling, part * half.ceiling),
    )


def _share(value: float | None, half: float) -> Range | None:
    return None if value is None or math.isnan(half) else _within(value, half, 0.0, 1.0)


def _within(value: float, half: float, lowest: float, highest: float) -> Range:
    return max(value - half, lowest), min(value + half, highest)


PathLike = str | os.PathLike
DIFFERENCE = "difference"
"""The key of a strategy's difference in what `halfstep lab replay --validate --json` prints."""


def differences_in(paths: PathLike | Sequence[PathLike]) -> list[Tail]:
    """The differences that some files keep.

    Args:
        paths: Files of what `halfstep lab replay --validate --json` printed.

    Raises:
        LoopError: If one cannot be read, or is something else.
    """
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    return [one for path in listed for one in _of_file(as_path("replay", "validated", path))]


def _of_file(path: pathlib.Path) -> list[Tail]:
    try:
        rows = read_object(path.read_text(encoding="utf-8"))["strategies"]
        return [_tail(row[DIFFERENCE]) for row in rows if row[DIFFERENCE] is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise LoopError(
            f"{path}: cannot read validated runs from it: {error}. Expected what halfstep lab replay --validate --json "
            "printed."
        ) from None


def _tail(found: Mapping[str, Any]) -> Tail:
    steps = int(found["steps"])
    if steps < 1:
        raise ValueError(f"steps is {steps}")
    # JSON has null for NaN.
    others = (float("nan") if found[name] is None else float(found[name]) for name in Tail._fields[1:])
    return Tail(steps, *others)
