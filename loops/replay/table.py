"""A replay as a table, with what may be relied on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loops.replay.intervals import Intervals, Range
from loops.support.text import columns

if TYPE_CHECKING:
    from loops.replay.results import Replayed

_HEADS = ("strategy", "skips", "rate", "mean scale", "final scale", "flushed", "floor", "ceiling")
_LAST = ("uncertain", "may differ at")


def table(strategies: Sequence[Replayed], lacking: str | None, width: int | None) -> str:
    """A row for each strategy, with a second one of its intervals, and sentences on which columns hold.

    Args:
        strategies: The rows.
        lacking: Why there are figures without an interval, or None.
        width: The room, in characters; None for any.
    """
    rows: list[tuple[str, ...]] = [(*_HEADS, *_LAST)]
    for one in strategies:
        rows.append(_figures(one))
        if one.intervals is not None:
            rows.append(_ranges(one.intervals))
    return "\n".join([columns(rows, width), *_sentences(strategies, lacking)])


def _figures(one: Replayed) -> tuple[str, ...]:
    return (
        one.strategy,
        f"{one.skips:,}",
        f"{one.skip_rate:.3%}",
        f"2^{one.mean_log2_scale:.2f}",
        f"{one.final_scale:.5g}",
        _share(one.flushed),
        _share(one.at_floor, 0),
        _share(one.at_ceiling, 0),
        f"{one.uncertain:,}",
        "never" if one.may_differ_at is None else f"{one.may_differ_at:,}",
    )


def _ranges(found: Intervals) -> tuple[str, ...]:
    return (
        "  90% of runs",
        _range(found.skips, ",.0f"),
        _range(found.skip_rate, ".3%"),
        f"2^{found.mean_log2_scale[0]:.2f} to 2^{found.mean_log2_scale[1]:.2f}",
        _range(found.final_scale, ".5g"),
        _range(found.flushed, ".3%"),
        _range(found.at_floor, ".0%"),
        _range(found.at_ceiling, ".0%"),
        "",
        "",
    )


def _sentences(strategies: Sequence[Replayed], lacking: str | None) -> list[str]:
    if all(one.may_differ_at is None for one in strategies):
        return ["No skip is near to differing from those of the recorded run: every column holds."]
    how = " within their intervals" if any(one.intervals is not None for one in strategies) else ", but for a few"
    lines = [
        "After 'may differ at', where a skip differs from the recorded run's or nearly does, a real run is another.",
        f"There skips and rate hold{how}; mean scale, final scale, flushed, floor and ceiling are indicative.",
    ]
    stalling = [one.strategy for one in strategies if one.may_stall]
    if stalling:
        lines.append(
            f"The skips of {', '.join(stalling)} do not hold: a run may go on skipping where the scale does not fall."
        )
    return lines if lacking is None else [*lines, lacking]


def _share(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _range(found: Range | None, form: str) -> str:
    return "-" if found is None else f"{found[0]:{form}} to {found[1]:{form}}"
