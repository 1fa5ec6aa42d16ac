"""Scalers of Flax, jmp and optax."""

from __future__ import annotations

from scaler.checks import SMALLEST_SCALE, check_count
from scaler.outcome.stuck import StuckPolicy
from scaler.presets.rules.precision import checked_bound
from scaler.presets.rules.streak import DIVIDES, Streak, streak
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
