"""Scalers of Keras, TensorFlow and OpenSeq2Seq."""

from __future__ import annotations

from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE
from scaler.presets.rules.precision import checked_bound
from scaler.presets.rules.streak import DIVIDES, Streak, streak
from scaler.strategies.dynamic import Dynamic


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
