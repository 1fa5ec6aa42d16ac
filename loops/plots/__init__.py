"""Plots of a recorded run, each a matplotlib `Figure`. They need the extra `study`.

Each function takes a run as its first argument: the path of its folder, its trace or its log; what `loops.observe.read`
returned; or a mapping of arrays [steps], such as `{"loss": ..., "loss_scale": ..., "applied": ...}`.
"""

from loops.plots.exponent_map import exponents as exponents
from loops.plots.histograms import histogram as histogram
from loops.plots.losses import loss as loss
from loops.plots.margins import headroom as headroom
from loops.plots.scales import loss_scale as loss_scale

__all__ = ["exponents", "headroom", "histogram", "loss", "loss_scale"]
