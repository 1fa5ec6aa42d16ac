"""Shows a diagnosis: as lines for a terminal, with advice and the gain of each change; its memory as a picture.

The picture has the memory under each policy, and layer by layer. In an HTML page its numbers stand below it.
"""

from __future__ import annotations

import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loops.diagnose.doctor.diagnosis import Diagnosis
from loops.diagnose.doctor.timing import Kind, PairedTiming, Pipeline, Spread
from loops.diagnose.memory import Bytes, Footprint
from loops.support.drawing import as_source, drawing, require_matplotlib, save, svg_of
from loops.support.errors import NotWritable
from loops.support.pages import Table, render
from loops.support.palette import BLUE, GREEN, ORANGE, PINK, RED, SKY, TEXT
from loops.support.text import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 80
_LAYERS, _DRAWN = 12, 24
"""The largest numbers of layers that are listed, and drawn."""
_SHARE = 0.05
"""The smallest share of a step's time, or of the steps, that is worth a sentence."""
_PARTS = {
    "weights": BLUE,
    "masters": SKY,
    "slots": GREEN,
    "gradients": PINK,
    "copies": ORANGE,
    "activations": RED,
}
_KINDS = (".png", ".svg", ".pdf", ".html")


def text(found: Diagnosis, width: int | None = None) -> str:
    """The whole diagnosis: times, what was tried, memory, and what to change.

    Args:
        found: The diagnosis.
        width: The largest number of characters in a line; None for 80.
    """
    room, advised = width or _WIDTH, advice(found)
    last = "what to change" if advised else "Nothing that was tried makes it faster or smaller by more than the noise."
    parts = [
        _folded(f"model {found.model!r}, {found.policy}, on {found.device}", room),
        _times(found, room),
        _tried(found, room),
        _memory(found, room),
        "\n".join(_folded(line, room) for line in (last, *(f"- {line}" for line in advised))),
    ]
    return "\n\n".join(parts)


def sized(count: int) -> str:
    """Bytes with three digits, such as "1.23 MB"."""
    factor, unit = _unit(count)
    return f"{_digits(count / factor)} {unit}"


def _times(found: Diagnosis, room: int) -> str:
    rows: list[tuple[str, Spread]] = [("the step, its batch in memory", found.step)]
    if found.pipeline:
        rows += [("the step with its pipeline", found.pipeline.turns.after), ("a batch alone", found.pipeline.alone)]
    if found.casts:
        rows.append((f"its {found.casts.count} casts alone, {sized(found.casts.bytes)}", found.casts.milliseconds))
    heads, lines = ("where the time goes", "ms", "quartiles"), []
    if found.products:
        parts = ", ".join(f"{share:.0%} in {dtype}" for dtype, share in found.products.items())
        lines.append(f"multiplications of products and convolutions: {parts}")
    layers = list(dict.fromkeys(f"{_name(row.layer)} in {row.dtype}" for row in found.different))
    if layers:
        lines.append(f"not, or not all, in the dtype of their policy: {_some(layers)}")
    if found.padded:
        odd = found.padded
        lines.append(
            f"sides that are not multiples of 8: {odd.sides} in {odd.layer or 'no layer'}; {odd.rounded} takes "
            f"{_gain(odd.turns)}"
        )
    if found.pipeline:
        lines.append(f"skipped: {found.pipeline.skipped} of {found.pipeline.attempted} steps")
    table = columns([heads, *((f"  {name}", *_spread(one)) for name, one in rows)], room)
    return "\n".join([table, *(_folded(line, room) for line in lines)])


def _tried(found: Diagnosis, room: int) -> str:
    rows: list[Sequence[str]] = [("tried", "ms before", "after", "times", "quartiles", "")]
    for one in found.trials:
        if one.turns is None:
            rows.append((f"  {one.name}", "-", "-", "-", "-", one.verdict))
        else:
            before, after, ratio = (
                f"{part.median:.3g}" for part in (one.turns.before, one.turns.after, one.turns.ratio)
            )
            low, high = one.turns.ratio.low, one.turns.ratio.high
            rows.append((f"  {one.name}", before, after, ratio, f"{low:.2f} to {high:.2f}", one.verdict))
    problems = [_folded(f"{one.name}: {one.problem}", room) for one in found.trials if one.problem]
    return "\n".join([columns(rows, room), *problems])


def _memory(found: Diagnosis, room: int) -> str:
    own = found.footprints[0]
    factor, unit = _unit(max(one.all.total for one in found.footprints))
    heads = ["grads" if part == "gradients" else part for part in (*_PARTS, "total")]
    rows = [
        (f"  {one.policy}", *_cells(one.all, factor), _cell(one.total_recomputed, factor)) for one in found.footprints
    ]
    lines = [columns([(f"memory, {unit}", *heads, "recomputed"), *rows], room, gap=1)]
    if own.all.uncounted:
        lines.append(_folded(f"not counted: {own.all.uncounted} saved tensors of unknown size", room))
    layers = sorted(own.layers.items(), key=lambda item: -item[1].total)
    factor, unit = _unit(layers[0][1].total)
    shown = [(f"  {_name(name)}", *_cells(one, factor)) for name, one in layers[:_LAYERS]]
    lines += ["", columns([(f"{own.policy}, {unit}", *heads), *shown], room, gap=1)]
    rest = sum(one.total for _, one in layers[_LAYERS:])
    lines += [_folded(f"  and {len(layers) - _LAYERS} smaller ones: {sized(rest)}", room)] if rest else []
    return "\n".join(lines)


def _name(layer: str | None, room: int = 24) -> str:
    if layer is None:
        return "(the loss, all else)"
    return layer if len(layer) <= room else "…" + layer[1 - room :]


def _cells(one: Bytes, factor: float) -> tuple[str, ...]:
    return tuple(_cell(getattr(one, part), factor) for part in (*_PARTS, "total"))


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


def _folded(line: str, room: int) -> str:
    return textwrap.fill(line, room, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def advice(found: Diagnosis) -> list[str]:
    """The advice as sentences: the largest gain first, memory last. Empty if nothing is worth changing."""
    worth_it = [(one, one.turns) for one in found.trials if one.turns and _worth_it(one.turns)]
    faster = sorted(worth_it, key=lambda pair: pair[1].ratio.median)
    lines = [f"{one.name}: {_gain(turns)}. To use it: {one.advice}." for one, turns in faster]
    if found.pipeline:
        lines += _of_pipeline(found.pipeline, prefetched=any(one.kind is Kind.PREFETCH for one, _ in faster))
    if (
        found.casts
        and found.policy.startswith("mixed_")
        and found.casts.milliseconds.median > _SHARE * found.step.median
    ):
        share = found.casts.milliseconds.median / found.step.median
        lines.append(
            f"casts: {found.casts.count} per step write {found.casts.bytes / 1e6:.3g} MB, which alone takes "
            f"{share:.0%} of the step's time. 16-bit weights with float32 masters need fewer: use the policy "
            f"{found.policy.removeprefix('mixed_')!r}."
        )
    odd = found.padded
    if odd and _worth_it(odd.turns):
        lines.append(
            f"shapes: layer {odd.layer!r} multiplies {_sides(odd.sides)} in {odd.dtype}; {_sides(odd.rounded)} takes "
            f"{odd.turns.ratio.median:.2f} times the time. Choose multiples of 8, if you can choose the sizes."
        )
    return lines + _of_memory(found)


def _of_pipeline(pipeline: Pipeline, *, prefetched: bool) -> list[str]:
    lines = []
    if pipeline.turns.verdict == "slower" and pipeline.share > _SHARE and not prefetched:
        lines.append(
            f"the input pipeline: it takes {pipeline.share:.0%} of a step, and prefetch alone does not hide it. Cache "
            "constant parts with .cache(), and map with num_parallel_calls=tf.data.AUTOTUNE, after .batch() if the "
            "function can take batches."
        )
    if pipeline.attempted and pipeline.skipped > _SHARE * pipeline.attempted:
        lines.append(
            f"skips: {pipeline.skipped} of {pipeline.attempted} steps moved no weight, and took their full time. "
            "`halfstep explain` says why; hs.observe.find_scale finds a first loss scale."
        )
    return lines


def _of_memory(found: Diagnosis) -> list[str]:
    own = found.footprints[0]
    lines = []
    least = min(found.footprints[1:], key=lambda one: one.all.total, default=own)
    if least.all.total < (1 - _SHARE) * own.all.total:
        what = " with masters" if least.policy in ("float16", "bfloat16") else ""
        lines.append(
            f"memory: {least.policy}{what} would need {least.all.total / own.all.total:.0%} of what {own.policy} needs."
        )
    with_it = own.total_recomputed
    if with_it is not None and with_it < (1 - _SHARE) * own.all.total:
        price = next((one for one in found.trials if one.kind is Kind.RECOMPUTE and one.turns), None)
        time = f", at {price.turns.ratio.median:.2f} times the time" if price and price.turns else ""
        lines.append(f"memory: gradient checkpointing would need {with_it / own.all.total:.0%} of it{time}.")
    return lines


def _worth_it(turns: PairedTiming) -> bool:
    return turns.verdict == "faster" and turns.ratio.median < 1 - _SHARE


def _gain(turns: PairedTiming) -> str:
    ratio = turns.ratio
    return f"{ratio.median:.2f} times the time ({ratio.low:.2f} to {ratio.high:.2f})"


def _sides(sides: tuple[int, ...]) -> str:
    rows, inner, columns = sides
    return f"({rows}, {inner}) by ({inner}, {columns})"


def write_picture(found: Sequence[Footprint], path: str | os.PathLike) -> None:
    """Draws footprints into a file: PNG, SVG or PDF by its name, or a page with the picture in it for ".html".

    Raises:
        LoopError: If matplotlib is not installed.
        NotWritable: If the file cannot be written.
    """
    figure, path = memory_figure(found), pathlib.Path(path)
    if path.suffix.lower() != ".html":
        save(figure, path)
        return
    try:
        path.write_text(memory_page(found, figure), encoding="utf-8")
    except OSError as error:
        raise NotWritable(f"{path}: the page cannot be written ({error.strerror or error}).") from error


def check_picture(path: str | os.PathLike) -> None:
    """Checks that a picture can be written, before the diagnosis takes its time.

    Raises:
        LoopError: If matplotlib is not installed.
        NotWritable: If the folder does not exist, or the name does not end like a picture's.
    """
    require_matplotlib()
    path = pathlib.Path(path)
    if path.suffix.lower() not in _KINDS or not path.parent.is_dir():
        raise NotWritable(
            f"{path}: no picture can be written there. Name one of {', '.join(_KINDS)}, in an existing folder."
        )


def memory_figure(found: Sequence[Footprint]) -> Figure:
    """The picture as a matplotlib Figure."""
    own = found[0]
    layers = sorted(own.layers.items(), key=lambda item: -item[1].total)[:_DRAWN]
    heights = [1.2 + 0.35 * len(found), 1.0 + 0.25 * len(layers)]
    with drawing(sum(heights)) as figure:
        above, below = figure.subplots(2, 1, height_ratios=heights)
        _bars(above, [(one.policy, one.all) for one in found])
        above.set_title("under each policy; “|” with gradient checkpointing", loc="left")
        for at, one in enumerate(found):
            if one.total_recomputed is not None:
                above.plot(one.total_recomputed / 1e6, at, "|", color=TEXT, markersize=14)
        _bars(below, [(name or "(the loss, all else)", one) for name, one in layers])
        below.set_title(f"by layer, {own.policy}", loc="left", parse_math=False)
        below.set_xlabel("MB")
        figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=len(_PARTS), fontsize=8)
        return figure


def _bars(axes: Any, rows: Sequence[tuple[str, Bytes]]) -> None:
    starts = [0.0] * len(rows)
    for part, colour in _PARTS.items():
        widths = [(getattr(one, part) or 0) / 1e6 for _, one in rows]
        axes.barh(range(len(rows)), widths, left=starts, color=colour, label=part, height=0.7)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()


def memory_page(found: Sequence[Footprint], figure: Figure) -> str:
    """A page that needs no other file.

    Args:
        found: The footprint under each policy, the model's own first.
        figure: The picture of these footprints.
    """
    own = found[0]
    layers = sorted(own.layers.items(), key=lambda item: -item[1].total)
    return render(
        __package__,
        "memory.html",
        title="Memory of a training step",
        picture=as_source(svg_of(figure)),
        policies=Table(
            ("MB", *_PARTS, "total", "with checkpointing"),
            [(one.policy, *_megabytes(one.all), _in_megabytes(one.total_recomputed)) for one in found],
            "Under each policy",
        ),
        layers=Table(
            ("MB", *_PARTS, "total"),
            [(name or "(the loss, all else)", *_megabytes(one)) for name, one in layers],
            f"By layer, {own.policy}",
        ),
    )


def _megabytes(one: Bytes) -> list[str]:
    return [_in_megabytes(getattr(one, part)) for part in (*_PARTS, "total")]


def _in_megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.3g}"
