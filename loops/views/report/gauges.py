"""The figures of ready probes: one for each of their outputs, with a curve for each layer."""

from __future__ import annotations

import numpy as np

from loops.record.noise_scale import noise_scale
from loops.record.run import Gauges, Recorded
from loops.record.thin import sampled
from loops.record.trace.gauges import noise_pairs
from loops.support.pages import Table
from loops.support.text import amount
from loops.views.charts.axis import linear_axis, loss_axis
from loops.views.charts.chart import RUNS, Chart, Curve
from loops.views.report.drawn import drawn
from loops.views.report.figures import Figure
from loops.views.report.tables import cell

_ROWS = 24
"""The most rows of a table."""
_FIGURES = {
    "attention_logit": (
        "Attention logits",
        "The largest magnitude of a logit of each attention layer. Logits that grow without bound go before many "
        "divergences of transformers.",
    ),
    "attention_entropy": (
        "Attention entropy, in nats",
        "The mean entropy of each layer's attention: 0 where each query sees one key alone. An entropy that falls to 0 "
        "goes before divergences, too.",
    ),
    "update_rms": (
        "Size of updates",
        "The root mean square of what a step added to a layer's weights. Skipped steps have none.",
    ),
    "update_ratio": (
        "Size of updates, relative to the weights",
        "The same over the root mean square of the weights before the step. About 0.001 is a usual rule of thumb.",
    ),
}
_NOISE = (
    "Gradient noise scale, in examples",
    "The simple noise scale, the ratio of two averages over about a hundred measured steps. Batches much smaller than "
    "it gain nearly all of each further example, larger ones little.",
)
_LOWEST_FIRST = ("attention_entropy",)
"""Outputs of which small values are those to look at."""


def gauge_figures(run: Recorded, columns: int) -> list[Figure]:
    """The figures of what a run's ready probes measured; none without any."""
    if run.gauges is None:
        return []
    found = [_figure(output, *said, run.gauges.of(output), columns) for output, said in _FIGURES.items()]
    names, scales = run.gauges.names, {}
    for name, noise, signal in noise_pairs(names):
        parts = [run.gauges.values[:, names.index(one)] for one in (noise, signal)]
        scales[name.partition("/")[2] or "noise scale"] = np.where(np.isfinite(parts[0]), noise_scale(*parts), np.nan)
    if scales:
        values = np.stack(list(scales.values()), axis=1)
        found.append(_figure("noise_scale", *_NOISE, Gauges(run.gauges.step, tuple(scales), values), columns))
    return [figure for figure in found if figure is not None]


def _figure(output: str, heading: str, said: str, gauges: Gauges, columns: int) -> Figure | None:
    known = np.isfinite(gauges.values).any(axis=1)
    if not known.any():
        return None
    step, values = gauges.step[known], np.where(np.isfinite(gauges.values), gauges.values, np.nan)[known]
    with np.errstate(all="ignore"):
        means = np.array([np.nanmean(column) if np.isfinite(column).any() else np.nan for column in values.T])
    order = np.argsort(means if output in _LOWEST_FIRST else -means, kind="stable")[: min(RUNS, len(means))]
    if len(means) > RUNS:
        which = "lowest" if output in _LOWEST_FIRST else "highest"
        said += f" The {RUNS} of {amount(len(means), 'layer')} with the {which} mean."
    places = sorted(place for place in order.tolist() if np.isfinite(means[place]))
    shown, names = values[:, places], [gauges.names[place] for place in places]
    y = loss_axis(shown) if (shown[np.isfinite(shown)] > 0).all() else linear_axis(shown)
    curves = [
        Curve(name, step, column, f"run{place}")
        for place, (name, column) in enumerate(zip(names, shown.T, strict=True))
    ]
    finite = shown[np.isfinite(shown)]
    alt = f"{heading} over {amount(len(step), 'measured step')}, from {finite.min():.3g} to {finite.max():.3g}."
    if y.log:
        said += " The axis is logarithmic."
    chart = Chart(alt, heading, int(gauges.step[0]), int(gauges.step[-1]), y, curves)
    return Figure(heading, drawn(chart, columns), said, [("", _table(step, names, shown))])


def _table(step: np.ndarray, names: list[str], values: np.ndarray) -> Table:
    at = sampled(len(step), _ROWS).tolist()
    rows = [[cell(int(step[place])), *(cell(float(one)) for one in values[place])] for place in at]
    said = "" if len(at) == len(step) else f"{len(at)} of {len(step):,} measured steps"
    return Table(["step", *names], rows, said)
