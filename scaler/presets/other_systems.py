"""Scalers of Flax, jmp, optax, Keras, TensorFlow, OpenSeq2Seq, MXNet, MindSpore, PaddlePaddle, Chainer and nnabla."""

from __future__ import annotations

import dataclasses

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, check_count, check_number, is_symbolic
from scaler.outcome.stuck import StuckPolicy
from scaler.presets.rules.climbs import FirstOverflow
from scaler.presets.rules.precision import as_double, checked_bound
from scaler.presets.rules.streak import DIVIDES, OneStepLate, Streak, streak
from scaler.strategies.dynamic import Dynamic
from scaler.strategies.static import NoScaling


def flax(
    initial_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float | None = SMALLEST_SCALE,
) -> Streak:
    """`flax.training.dynamic_scale.DynamicScale`, in Flax 0.12. A growth takes growth_interval + 1 finite steps.

    The scale and the factors are float32, as under `jax.jit`.

    Parts from it: Flax grows up to the largest float32, which is not a power of two. Ours stays at 2^126, from the
    111th growth by default; without `min_scale` ours stays at 2^-126.
    """
    check_count("growth_interval", growth_interval, 2000)
    return streak(
        initial_scale,
        growth_factor,
        backoff_factor,
        growth_interval + 1,
        in_float32=True,
        backoff_floor=checked_bound("min_scale", min_scale, SMALLEST_SCALE),
    )


def jmp(
    initial_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
) -> Streak:
    """`jmp.DynamicLossScale`, in jmp 0.0.4. It multiplies by the factor and divides by it, in float32.

    jmp has no default for the first scale; this is the one in its documentation.

    Parts from it: jmp grows up to the largest float32; ours stays at 2^126, from the 112th growth by default. jmp
    forgets a `min_scale` other than 1 under `jax.jit`; ours never does.
    """
    floor = checked_bound("min_scale", min_scale)
    return streak(initial_scale, growth_factor, DIVIDES, growth_interval, in_float32=True, backoff_floor=floor)


def optax_apply_if_finite() -> NoScaling:
    """`optax.apply_if_finite`: no scale, and non-finite steps are skipped, as with every strategy.

    Parts from it: after `max_consecutive_errors` skipped steps in a row optax gives up and applies the non-finite
    update. Ours never does; `optax_apply_if_finite_stuck(max_consecutive_errors)` raises there.
    """
    return NoScaling()


def optax_apply_if_finite_stuck(max_consecutive_errors: int) -> StuckPolicy:
    """Raises at the non-finite step that optax would apply, the one after `max_consecutive_errors` in a row.

    Raises:
        InvalidArgument: If that is not an integer of at least 1; at 0 optax applies every step.
    """
    check_count("max_consecutive_errors", max_consecutive_errors, 5)
    most = max_consecutive_errors + 1
    return StuckPolicy(consecutive_skips=most, skip_rate=None, consecutive_bad_losses=None, bad_loss_rate=None)


def keras(initial_scale: float = 2.0**15, *, growth_interval: int = 2000) -> Dynamic:
    """`keras.optimizers.LossScaleOptimizer`, in Keras 3.15. It doubles and halves.

    Parts from it: Keras has no bounds. Ours stays in [2^-126, 2^126], so from the defaults they part at the 142nd
    non-finite step in a row and at the 112th growth. There Keras goes on to 0, where its next finite step writes NaN
    into the weights, or to infinity, where it stays.
    """
    return Dynamic(
        initial_scale,
        growth_interval=growth_interval,
        min_scale=SMALLEST_SCALE,
        max_scale=LARGEST_SCALE,
        sees_every_step=True,
    )


def tf_keras(initial_scale: float = 2.0**15, *, growth_factor: float = 2.0, growth_interval: int = 2000) -> Streak:
    """`tf_keras.mixed_precision.LossScaleOptimizer`, in tf_keras 2.21; `DynamicLossScale` of TensorFlow 1 too.

    It multiplies by the factor and divides by it, down to 1, in float32. tf_keras always takes 2; `DynamicLossScale`
    has the `multiplier`. A scale below 1 goes to 1 at a non-finite step.

    Parts from it: tf_keras grows up to the largest float32. Ours stays at 2^126, from the 112th growth by default.
    """
    return streak(initial_scale, growth_factor, DIVIDES, growth_interval, in_float32=True, backoff_floor=1.0)


def tf_contrib(
    initial_scale: float,
    *,
    growth_interval: int,
    hysteresis: int = 2,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.8,
) -> Streak:
    """`tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`, of TensorFlow 1.

    It backs off at each hysteresis-th non-finite step since the scale last changed, consecutive or not, down to 1.
    The scale and the factors are float32. The first scale and the interval have no defaults.

    Parts from it: it grows up to the largest float32; ours stays at 2^126.
    """
    return streak(
        initial_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis=hysteresis,
        refill=("growth", "backoff"),
        in_float32=True,
        backoff_floor=1.0,
    )


def openseq2seq_backoff(
    max_scale: float = 2.0**14,
    *,
    growth_factor: float = 2.0,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
) -> Streak:
    """OpenSeq2Seq's `BackoffScaler`. It starts at `max_scale`, multiplies and divides.

    Parts from it: nowhere, within [2^-126, 2^126]. OpenSeq2Seq clips to both bounds at each change, which is the same.
    """
    return streak(
        checked_bound("max_scale", max_scale),
        growth_factor,
        DIVIDES,
        growth_interval,
        in_float32=True,
        backoff_floor=checked_bound("min_scale", min_scale),
        growth_ceiling=max_scale,
    )


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
    return streak(
        initial_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis=hysteresis,
        refill=("finite", "backoff"),
        in_float32=True,
    )


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
    dynamic = paddle(
        initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
    )
    return dataclasses.replace(dynamic, backoff_floor=1.0)


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
