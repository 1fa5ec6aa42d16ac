"""Plots the scales of several strategies over the recorded limit."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from loops.support.palette import LINE, mark
from loops.support.plot_style import STYLE, WIDTH, shortened

_POINTS = 2000
"""The most that are drawn of a line, each the extremes of the steps around it."""


@matplotlib.rc_context(STYLE)
def replay_figure(step: np.ndarray, limit: np.ndarray, scales: Mapping[str, np.ndarray]) -> Figure:
    """A line of scales for each strategy, and a grey area above the limit, where a step is skipped.

    Args:
        step: Int [steps], the steps' numbers.
        limit: Float [steps]; a step with a scale above it is skipped.
        scales: The scales of each strategy by its name, float [steps].
    """
    figure = Figure((WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    every = -(-len(step) // _POINTS)
    highest = 4 * max(float(np.max(one)) for one in scales.values())
    x = step[::every]
    shown = np.clip(_least(limit, every), np.finfo(np.float32).tiny, highest)
    axes.fill_between(x, shown, highest, step="mid", color=LINE, linewidth=0, label="skipped")
    for number, (name, values) in enumerate(scales.items()):
        axes.step(x, -_least(-values, every), where="mid", label=shortened(name, 60), **mark(number).line)
    axes.set_yscale("log", base=2)
    lowest = min(float(np.min(one)) for one in scales.values())
    axes.set_ylim(lowest / 4, highest)
    axes.set_xlim(step[0], max(step[-1], step[0] + 1))
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    legend = figure.legend(loc="outside lower left", ncols=2, fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _least(values: np.ndarray, every: int) -> np.ndarray:
    """The minimum of each group of `every` values."""
    return np.minimum.reduceat(values, np.arange(0, len(values), every))
