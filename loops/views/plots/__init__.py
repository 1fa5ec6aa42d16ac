"""Plots of a recorded run, each a matplotlib `Figure`. They need the extra `study`.

Each function takes a run as its first argument: the path of its folder, its trace or its log; what `loops.observe.read`
returned; or a mapping of arrays [steps], such as `{"loss": ..., "loss_scale": ..., "applied": ...}`.
"""

from loops.views.plots.exponent_map import exponents as exponents
from loops.views.plots.histograms import histogram as histogram
from loops.views.plots.losses import loss as loss
from loops.views.plots.margins import headroom as headroom
from loops.views.plots.scales import loss_scale as loss_scale

__all__ = ["exponents", "headroom", "histogram", "loss", "loss_scale"]
