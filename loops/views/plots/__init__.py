"""Plots of a recorded run, each a matplotlib `Figure`. They need the extra `study`.

Each function takes a run as its first argument: the path of its folder, its trace or its log; what `loops.observe.read`
returned; or a mapping of arrays [steps], such as `{"loss": ..., "loss_scale": ..., "applied": ...}`.
"""

from loops.views.plots.curves import headroom as headroom
from loops.views.plots.curves import loss as loss
from loops.views.plots.curves import loss_scale as loss_scale
from loops.views.plots.exponents import exponents as exponents
from loops.views.plots.exponents import histogram as histogram

__all__ = ["exponents", "headroom", "histogram", "loss", "loss_scale"]
