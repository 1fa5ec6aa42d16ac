"""The loss scales of the parts of a composed step, with the steps that each part skipped."""

from __future__ import annotations

import numpy as np

from loops.record.run import Recorded
from loops.record.summary import number
from loops.support.part_names import columns_of
from loops.support.text import amount
from loops.views.report.axes import octave_axis, steps_axis
from loops.views.report.chart import Curve, Lane, chart
from loops.views.report.figures import Figure, is_constant
from loops.views.report.tables import of_steps


def part_scale_charts(run: Recorded, columns: int) -> list[Figure]:
    """The loss scale of each part, and its skips; none for a step of one loss, which `scale_chart` draws."""
    return [
        _chart(run, part, run.column(name), columns)
        for part, name in columns_of(run.columns, "loss_scale").items()
        if part and (run.column(name) > 0).any()
    ]


def _chart(run: Recorded, part: str, scale: np.ndarray, columns: int) -> Figure:
    x, usual = steps_axis(int(run.step[0]), int(run.step[-1])), scale[np.isfinite(scale) & (scale > 0)]
    y = octave_axis(usual)
    # A part that was not attempted waited for its turn, or for the end of its window.
    skipped = (run.column(f"{part}/applied") == 0) & (run.column(f"{part}/attempted") == 1)
    heading, times = f"Loss scale of {part}", amount(int(skipped.sum()), "step")
    if is_constant(scale) and not skipped.any():
        said = f"The loss scale of {part} was {number(float(usual[0]))} at each step. No step was skipped."
        return Figure(heading, None, said, [])
    lanes = [Lane(f"skipped: {times}", x.of(run.step)[skipped], "pink")] if skipped.any() else []
    ends = f"from {number(float(usual[0]))} to {number(float(usual[-1]))}"
    alt = f"Loss scale of {part} over {amount(len(run), 'step')}, {ends}"
    alt += f"; skipped at {times}." if skipped.any() else "; no step was skipped."
    said = f"The loss scale of {part}, as a power of two."
    said += " Below it a mark for each step that it skipped." if skipped.any() else ""
    curve = Curve("loss scale", x.of(run.step), y.of(scale), "blue", stairs=True)
    drawn = chart(alt, y, x, [curve], columns=columns, lanes=lanes)
    return Figure(heading, drawn, said, [("", of_steps(run, [("loss scale", scale)]))])
