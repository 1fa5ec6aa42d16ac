"""Whether XLA compiles a loop's step with `jit_compile="auto"`, by Keras's rule for `fit`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

import scaler
from loops.backend.xla import is_deterministic, not_for_xla

AUTO = "auto"


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def check_jit_compile(jit_compile: object) -> None:
    """Refuses what is neither a bool nor "auto"."""
    if not isinstance(jit_compile, bool) and jit_compile != AUTO:
        raise scaler.InvalidArgument(f'Loop(jit_compile={jit_compile!r}): expected True, False or "auto".')


def may_compile(strategy: tf.distribute.Strategy | None, models: Iterable[Any]) -> bool:
    """Whether XLA should compile the step, as far as is known before the step is traced.

    The rule is that of Keras's `fit`: only on a GPU, not under a `tf.distribute` strategy, not with deterministic
    operations, and not with a layer whose `supports_jit` is False.
    """
    if not has_gpu() or strategy is not None or is_deterministic():
        return False
    layers = [layer for model in models for layer in scaler.observe.layers_of(model)]
    without = next((layer for layer in layers if not getattr(layer, "supports_jit", True)), None)
    if without is not None:
        _warn(f"its layer {without.name!r} says so (supports_jit=False)")
    return without is None


def can_be_compiled(concrete: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether XLA has a kernel for all operations of a step. Warns about those without one."""
    without = not_for_xla(concrete)
    if without is None:
        _warn("this release of TensorFlow does not list the kernels of an operation")
    elif without:
        _warn(f"it has no kernel for {', '.join(without)}")
    return without is not None and not without


def _warn(why: str) -> None:
    warnings.warn(
        f"Loop: XLA cannot compile this step, since {why}. It runs without XLA. Pass jit_compile=False if this is "
        "intended.",
        UserWarning,
        stacklevel=4,
    )
