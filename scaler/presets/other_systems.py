"""Scalers of MXNet, MindSpore, PaddlePaddle, Chainer and nnabla."""

from __future__ import annotations

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, check_count, check_number, is_symbolic
from scaler.outcome.stuck import StuckPolicy
from scaler.presets.rules.climbs import FirstOverflow
from scaler.presets.rules.lag import OneStepLate
from scaler.presets.rules.precision import as_double
from scaler.presets.rules.streak import DIVIDES, Streak, streak
from scaler.strategies.dynamic import Dynamic


def mxnet(initial_scale: float = 2.0**16, *, growth_interval: int = 2000, max_scale: float = 2.0**24) -> OneStepLate:
    """MXNet's `amp` `LossScaler`, in MXNet 2. What it decides is used one step late.

    It doubles and halves. In MXNet all three numbers are fixed.

    Parts from it: MXNet has no floor; ours is 2^-126, by default from the 144th non-finite step in a row.
    """
    return OneStepLate(
        Dynamic(initial_scale, growth_interval=growth_interval, min_scale=SMALLEST_SCALE, max_scale=max_scale)
    )


def mindspore(initial_scale: float = 2.0**24, *, growth_factor: float = 2.0, growth_interval: int = 2000) -> Streak:
    """MindSpore's `DynamicLossScaleManager`. It multiplies by the factor and by its reciprocal, down to 1.

    The scale is a Python float; ours is kept in double precision too. Its `DynamicLossScaleUpdateCell`, which compiled
    graphs use, follows the same rule in float32.

    Parts from it: MindSpore raises at the 1001st non-finite step in a row; ours stays at 1, and `mindspore_stuck()`
    raises. MindSpore has no ceiling; ours is 2^126, from the 103rd growth by default.

    Raises:
        InvalidArgument: For a first scale below 1, as in MindSpore.
    """
    check_number("initial_scale", initial_scale, "a number in [1, 2^126]", lambda v: 1 <= v <= LARGEST_SCALE)
    check_number("growth_factor", growth_factor, "a number in (0, 2^126]", lambda v: 2.0**-126 <= v <= LARGEST_SCALE)
    one = as_double(1.0) if is_symbolic(growth_factor) else 1.0
    return Streak(
        initial_scale,
        growth_factor=growth_factor,
        backoff_factor=one / growth_factor,
        growth_interval=growth_interval,
        backoff_floor=1.0,
        double=True,
    )


def mindspore_stuck() -> StuckPolicy:
    """Raises where MindSpore does: at the 1001st non-finite step in a row."""
    return StuckPolicy(consecutive_skips=1001, skip_rate=None, consecutive_bad_losses=None, bad_loss_rate=None)


def paddle(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> Streak:
    """`paddle.amp.GradScaler` in dygraph mode, in Paddle 3.

    It backs off at each hysteresis-th non-finite step in a row, and starts to count again. `AmpScaler` starts at 2^15
    with an interval of 1000. The scale and the factors are float32.

    Parts from it: Paddle has no bounds here; ours stays in [2^-126, 2^126], so from the defaults they part at the 143rd
    non-finite step in a row and at the 111th growth.
    """
    return _paddle(initial_scale, growth_factor, backoff_factor, growth_interval, hysteresis, SMALLEST_SCALE)


def paddle_static(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> Streak:
    """`paddle.static.amp.decorate`, the operator `update_loss_scaling`: as `paddle`, with a floor of 1.

    Its older form, without `level`, starts at 2^15 with an interval of 1000, a hysteresis of 2 and a backoff of 0.8.

    Parts from it: Paddle grows up to the largest float32; ours stays at 2^126, from the 111th growth by default.
    """
    return _paddle(initial_scale, growth_factor, backoff_factor, growth_interval, hysteresis, 1.0)


def chainer(interval: int = 1000) -> FirstOverflow:
    """Chainer's dynamic `Optimizer.loss_scaling`, in Chainer 7.8.

    The scale is a Python float in [1, 65504]; ours is kept in double precision too.

    Parts from it: nowhere.
    """
    return FirstOverflow(interval)


def nnabla(initial_scale: float = 8.0, *, growth_factor: float = 2.0, growth_interval: int = 2000) -> Streak:
    """`DynamicLossScalingUpdater` of nnabla. It multiplies by the factor and divides by it.

    A first growth takes growth_interval + 2 finite steps, each further one growth_interval + 1. nnabla repeats a
    non-finite step with new data at once, up to 100 times: each attempt is one step here. The scale is a Python float;
    ours is kept in double precision too.

    Parts from it: nnabla has no bounds; ours stays in [2^-126, 2^126], so from the defaults they part at the 130th
    non-finite attempt in a row and at the 124th growth.
    """
    check_count("growth_interval", growth_interval, 2000)
    more, most = growth_interval + 1, growth_interval + 2
    return streak(initial_scale, growth_factor, DIVIDES, more, first_interval=most, double=True)


def _paddle(
    initial_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    floor: float,
) -> Streak:
    """In either mode, with the mode's floor."""
    return streak(
        initial_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis=hysteresis,
        refill=("finite", "backoff"),
        in_float32=True,
        backoff_floor=floor,
    )
