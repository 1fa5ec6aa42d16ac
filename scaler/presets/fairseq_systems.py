"""Scalers of fairseq and of metaseq, which trained OPT."""

from __future__ import annotations

from scaler.outcome.stuck import StuckPolicy
from scaler.presets.rules.moving_window import MovingWindow
from scaler.presets.rules.skipped_at_floor import SkippedAtFloor
from scaler.presets.rules.tolerance import Tolerance


def fairseq(
    initial_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    growth_interval: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> Tolerance:
    """`DynamicLossScaler` of fairseq, with the defaults of the class.

    fairseq's command line starts at 2^7 instead, with an interval of 2^14 divided by the number of workers and by the
    accumulation. The scale is a Python float; ours is kept in double precision too.

    Parts from it: at a backoff to `min_loss_scale` or below fairseq keeps the scale and raises FloatingPointError; ours
    keeps it and goes on, and `fairseq_stuck()` raises. fairseq has no ceiling; ours is 2^126, reached from the default
    by 111 growths.
    """
    return Tolerance(
        initial_scale,
        growth_factor=growth_factor,
        growth_interval=growth_interval,
        tolerance=tolerance,
        threshold=threshold,
        min_loss_scale=min_loss_scale,
    )


def fairseq_stuck() -> StuckPolicy:
    """Raises where fairseq raises FloatingPointError, "Minimum loss scale reached".

    fairseq raises at the step that would lower the scale to `min_loss_scale`. With a visit of the host after each step
    so does this, else at the next visit; a `tolerance` is not waited for. With a `threshold` above `min_loss_scale`
    fairseq never raises: use another policy there, since this one takes the threshold for the floor.
    """
    return SkippedAtFloor()


def metaseq(
    initial_scale: float = 4.0,
    *,
    growth_factor: float = 2.0,
    growth_interval: int = 256,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 2.0**-5,
) -> MovingWindow:
    """`DynamicLossScaler` of metaseq: fairseq's, with an interval that is doubled and halved together with the scale.

    The interval is shortened by a non-finite step at the floor as well. The scale is a Python float; ours is kept in
    double precision too.

    Parts from it: metaseq has no ceiling; ours is 2^126, which takes 256 * 2^123 finite steps from the default.
    """
    return MovingWindow(
        initial_scale,
        growth_factor=growth_factor,
        growth_interval=growth_interval,
        tolerance=tolerance,
        threshold=threshold,
        min_loss_scale=min_loss_scale,
    )
