"""Writes a diagnosis as lines for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from loops.diagnose.doctor.advice import advice
from loops.diagnose.doctor.diagnosis import Diagnosis
from loops.diagnose.doctor.timing import Spread
from loops.diagnose.memory.footprint import Bytes
from loops.support.text import columns

_WIDTH = 80
_LAYERS = 12
"""The largest number of layers that are listed."""


class _Table(NamedTuple):
    """Rows below their headings. A column without a heading holds words."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    gap: int = 2


def text(found: Diagnosis, width: int | None = None) -> str:
    """The whole diagnosis: times, what was tried, memory, and what to change.

    Args:
        found: The diagnosis.
        width: The largest number of characters in a line; None for 80.
    """
    advised = advice(found)
    last = "what to change" if advised else "Nothing that was tried makes it faster or smaller by more than the noise."
    parts = [
        f"model {found.model!r}, {found.policy}, on {found.device}",
        "",
        *_times(found),
        "",
        *_tried(found),
        "",
        *_memory(found),
        "",
        last,
        *(f"- {line}" for line in advised),
    ]
    return "\n".join(_drawn(part, width or _WIDTH) for part in parts)


def sized(count: int) -> str:
    """Bytes with three digits, such as "1.23 MB"."""
    factor, unit = _unit(count)
    return f"{_digits(count / factor)} {unit}"


def _times(found: Diagnosis) -> list[str | _Table]:
    rows: list[tuple[str, Spread]] = [("the step, its batch in memory", found.step)]
    if found.pipeline:
        rows += [("the step with its pipeline", found.pipeline.turns.after), ("a batch alone", found.pipeline.alone)]
    if found.casts:
        rows.append((f"its {found.casts.count} casts alone, {sized(found.casts.bytes)}", found.casts.milliseconds))
    table = _Table(("where the time goes", "ms", "quartiles"), [(f"  {name}", *_spread(one)) for name, one in rows])
    lines: list[str | _Table] = [table]
    if found.products:
        parts = ", ".join(f"{share:.0%} in {dtype}" for dtype, share in found.products.items())
        lines.append(f"multiplications of products and convolutions: {parts}")
    layers = list(dict.fromkeys(f"{_name(row.layer)} in {row.dtype}" for row in found.different))
    if layers:
        lines.append(f"not, or not all, in the dtype of their policy: {_some(layers)}")
    if found.padded:
        odd, ratio = found.padded, found.padded.turns.ratio
        lines.append(
            f"sides that are not multiples of 8: {odd.sides} in {odd.layer or 'no layer'}; {odd.rounded} takes "
            f"{ratio.median:.2f} times the time ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    if found.pipeline:
        lines.append(f"skipped: {found.pipeline.skipped} of {found.pipeline.attempted} steps")
    return lines


def _tried(found: Diagnosis) -> list[str | _Table]:
    rows = []
    for one in found.trials:
        if one.turns is None:
            rows.append((f"  {one.name}", "-", "-", "-", "-", one.verdict))
        else:
            before, after, ratio = (
                f"{part.median:.3g}" for part in (one.turns.before, one.turns.after, one.turns.ratio)
            )
            low, high = one.turns.ratio.low, one.turns.ratio.high
            rows.append((f"  {one.name}", before, after, ratio, f"{low:.2f} to {high:.2f}", one.verdict))
    table = _Table(("tried", "ms before", "after", "times", "quartiles", ""), rows)
    return [table, *(f"{one.name}: {one.problem}" for one in found.trials if one.problem)]


def _memory(found: Diagnosis) -> list[str | _Table]:
    own = found.footprints[0]
    factor, unit = _unit(max(one.all.total for one in found.footprints))
    heads = ("weights", "masters", "slots", "grads", "copies", "activations", "total")
    rows = [
        (f"  {one.policy}", *_cells(one.all, factor), _cell(one.total_recomputed, factor)) for one in found.footprints
    ]
    lines: list[str | _Table] = [_Table((f"memory, {unit}", *heads, "recomputed"), rows, gap=1)]
    if own.all.uncounted:
        lines.append(f"not counted: {own.all.uncounted} saved tensors of unknown size")
    layers = sorted(own.layers.items(), key=lambda item: -item[1].total)
    factor, unit = _unit(layers[0][1].total)
    shown = [(f"  {_name(name)}", *_cells(one, factor)) for name, one in layers[:_LAYERS]]
    lines += ["", _Table((f"{own.policy}, {unit}", *heads), shown, gap=1)]
    rest = sum(one.total for _, one in layers[_LAYERS:])
    return [*lines, f"  and {len(layers) - _LAYERS} smaller ones: {sized(rest)}"] if rest else lines


def _name(layer: str | None, room: int = 24) -> str:
    if layer is None:
        return "(the loss, all else)"
    return layer if len(layer) <= room else "…" + layer[1 - room :]


def _cells(one: Bytes, factor: float) -> tuple[str, ...]:
    parts = (one.weights, one.masters, one.slots, one.gradients, one.copies, one.activations, one.total)
    return tuple(_cell(part, factor) for part in parts)


def _cell(count: int | None, factor: float) -> str:
    return "-" if count is None else _digits(count / factor) if count else "0"


def _unit(count: int) -> tuple[float, str]:
    return next(((factor, unit) for factor, unit in ((1e9, "GB"), (1e6, "MB")) if count >= factor), (1e3, "kB"))


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _spread(one: Spread) -> tuple[str, str]:
    return f"{one.median:.3g}", f"{one.low:.3g} to {one.high:.3g}"


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _drawn(part: str | _Table, room: int) -> str:
    """A line that is folded to the room, or a table."""
    if isinstance(part, str):
        return textwrap.fill(part, room, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return columns([part.heads, *part.rows], room, gap=part.gap)
