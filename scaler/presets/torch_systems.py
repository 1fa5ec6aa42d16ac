"""Scalers of PyTorch and of what is built on it."""

from __future__ import annotations

import dataclasses

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, check_count, check_scale
from scaler.outcome.stuck import StuckPolicy
from scaler.presets.rules.climbs import Log2, Spaced
from scaler.presets.rules.precision import checked_bound, smaller
from scaler.presets.rules.streak import DIVIDES, Streak, streak
from scaler.presets.rules.tolerance import MovingWindow, SkippedAtFloor, Tolerance
from scaler.strategies.dynamic import Dynamic


def pytorch(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Streak:
    """`torch.amp.GradScaler`, in torch 2.13.

    The scale is float32; the factors are doubles, and their product with it is rounded once.

    Parts from it: torch has no floor and no ceiling but the largest float32. Ours stays in [2^-126, 2^126], so from the
    defaults they part at the 143rd non-finite step in a row and at the 111th growth. There torch goes on to 0, and its
    next finite step writes infinities into the weights.

    Raises:
        InvalidArgument: Outside torch's own bounds, growth_factor > 1 and backoff_factor < 1; also for a
            backoff_factor below 2^-126 and a growth_interval below 1, which torch accepts and then never uses.
    """
    return streak(initial_scale, growth_factor, backoff_factor, growth_interval)


def fairscale(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Streak:
    """`fairscale.optim.grad_scaler.ShardedGradScaler`, in FairScale 0.4.13: the rule of `pytorch`.

    Parts from it: as `pytorch` does. Besides, with the optimizer's state on the CPU FairScale counts a step that
    overflowed on two ranks as finite; ours never does.
    """
    return streak(initial_scale, growth_factor, backoff_factor, growth_interval)


def nemo(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> Streak:
    """NeMo's `GradScaler`, in NeMo 2.5: the rule of `pytorch`, with a hysteresis that each finite step refills.

    Apex's kernel `update_scale_hysteresis`, which NeMo uses where it is installed, is the same rule.

    Parts from it: as `pytorch` does. Besides, NeMo forgets the hysteresis in a checkpoint; ours never does.
    """
    return streak(
        initial_scale, growth_factor, backoff_factor, growth_interval, hysteresis=hysteresis, refill=("finite",)
    )


def apex(
    initial_scale: float = 2.0**16,
    *,
    growth_interval: int = 2000,
    min_scale: float | None = None,
    max_scale: float = 2.0**24,
) -> Streak:
    """`apex.amp`'s `LossScaler` with `loss_scale="dynamic"`, before it was removed in May 2025.

    It doubles and halves; the first scale is lowered to `max_scale`. The scale is a Python float, and doubling or
    halving one gives the same after rounding to float32.

    Parts from it: without `min_scale` Apex halves down to a ZeroDivisionError. Ours stays at 2^-126, from the 143rd
    non-finite step in a row by default.
    """
    check_scale("initial_scale", initial_scale)
    return Streak(
        smaller(initial_scale, checked_bound("max_scale", max_scale)),
        growth_interval=growth_interval,
        backoff_floor=checked_bound("min_scale", min_scale, SMALLEST_SCALE),
        growth_ceiling=max_scale,
    )


def deepspeed(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    growth_interval: int = 1000,
    min_scale: float = 1.0,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
) -> Streak:
    """DeepSpeed's `DynamicLossScaler`, in DeepSpeed 0.19.

    It multiplies by the factor, its `scale_factor`, and divides by it. The first growth after the start or a non-finite
    step takes growth_interval + 1 finite steps, and each further one growth_interval. A growth refills the hysteresis,
    or each finite step if it is consecutive. The scale is a Python float; ours is kept in double precision too.

    Parts from it: at `min_scale` DeepSpeed raises; ours stays there, and `deepspeed_stuck()` raises. DeepSpeed has no
    ceiling; ours is 2^126, reached from the default by 110 growths.
    """
    check_count("growth_interval", growth_interval, 1000)
    return streak(
        initial_scale,
        growth_factor,
        DIVIDES,
        growth_interval,
        first_interval=growth_interval + 1,
        hysteresis=hysteresis,
        refill=("finite",) if consecutive_hysteresis else ("growth",),
        backoff_floor=checked_bound("min_scale", min_scale),
        double=True,
    )


def deepspeed_2025_02(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    growth_interval: int = 1000,
    min_scale: float = 1.0,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
) -> Streak:
    """DeepSpeed's `DynamicLossScaler`, as before June 2025: each growth takes growth_interval finite steps.

    Parts from it: as `deepspeed` does.
    """
    later = deepspeed(
        initial_scale,
        growth_factor=growth_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
    )
    return dataclasses.replace(later, first_interval=growth_interval)


def deepspeed_stuck(*, hysteresis: int = 2, consecutive_hysteresis: bool = False) -> StuckPolicy:
    """Raises where DeepSpeed raises "Current loss scale already at minimum".

    DeepSpeed raises at the step that would lower the scale from `min_scale`. With a visit of the host after each step
    so does this, else at the next visit. Where a run starts at `min_scale` already, a cumulative hysteresis is not
    waited for, and the first step is not looked at.

    Args:
        hysteresis: As given to `deepspeed`.
        consecutive_hysteresis: As given to `deepspeed`.
    """
    return SkippedAtFloor(in_a_row=hysteresis if consecutive_hysteresis else 1)


def megatron(
    initial_scale: float = 2.0**32,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float = 1.0,
    hysteresis: int = 2,
) -> Dynamic:
    """Megatron-core's `DynamicGradScaler`, with the defaults of its `OptimizerConfig`.

    Its docstring speaks of consecutive non-finite steps; they are counted since the last growth. Scale and factors are
    float32.

    Parts from it: Megatron has no ceiling and grows to infinity, where it stays for ever. Ours stays at 2^126, from the
    95th growth by default.
    """
    return Dynamic(
        initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=LARGEST_SCALE,
        hysteresis=hysteresis,
        sees_every_step=True,
    )


def colossalai(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 2,
) -> Dynamic:
    """ColossalAI's `DynamicGradScaler`, in ColossalAI 0.5: Megatron's rule, with a ceiling.

    A hysteresis of 0 acts as 1. ColossalAI's own optimizers pass min_scale=1 and max_scale=2**32.

    Parts from it: without bounds ColossalAI leaves float32, at the 143rd backoff and the 111th growth by default. Ours
    stays in [2^-126, 2^126]. ColossalAI also divides by the grown scale on a growth step; ours by the scale in use.
    """
    return Dynamic(
        initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=checked_bound("min_scale", min_scale, SMALLEST_SCALE),
        max_scale=checked_bound("max_scale", max_scale, LARGEST_SCALE),
        hysteresis=1 if isinstance(hysteresis, int) and hysteresis == 0 else hysteresis,
        sees_every_step=True,
    )


def guided_diffusion(initial_log2_scale: float = 20.0, *, growth: float = 1e-3) -> Log2:
    """`MixedPrecisionTrainer` of guided-diffusion: the logarithm of the scale climbs by `growth` and falls by 1.

    The scale is 2 to the power of a Python float and multiplies a float32 loss, so it is rounded to float32.

    Parts from it: it has no bounds; the logarithm of ours stays in [-126, 126], by default from the 147th non-finite
    step in a row.
    """
    return Log2(initial_log2_scale, growth=growth)


def dalle(replicas: int = 1) -> Spaced:
    """One of the gradient scales of DALL-E, as its paper describes them; its code was not published.

    In DALL-E each residual block has such a scale; here it is the scale of the loss. The paper does not say how exactly
    the scale is kept: ours is kept in double precision. "No two divisions within a window of 125 updates" is read as
    at least 125 steps from one to the next.

    Args:
        replicas: The number of data-parallel replicas, which all bounds are multiplied by.
    """
    return Spaced(replicas)


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
