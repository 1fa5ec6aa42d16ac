"""Whether XLA compiles the step of a loop that leaves it open, by Keras's rule for `fit`."""

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
    """Whether XLA is to compile the step, as far as it is known before the step is traced.

    It is as for Keras's `fit`: on a GPU alone, not under a `tf.distribute` strategy, not where operations have to be
    deterministic, and not with a layer that says that it does not work.
    """
    if not has_gpu() or strategy is not None or is_deterministic():
        return False
    layers = [layer for model in models for layer in scaler.observe.layers_of(model)]
    without = next((layer for layer in layers if not getattr(layer, "supports_jit", True)), None)
    if without is not None:
        _say(f"its layer {without.name!r} says so (supports_jit=False)")
    return without is None


def can_be_compiled(concrete: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether XLA has a kernel for all operations of a step. Says once for which it has none."""
    without = not_for_xla(concrete)
    if without is None:
        _say("this release of TensorFlow does not list the kernels of an operation")
    elif without:
        _say(f"it has no kernel for {', '.join(without)}")
    return without is not None and not without


def _say(why: str) -> None:
    warnings.warn(
        f"Loop: XLA cannot compile this step, since {why}. It runs without XLA. jit_compile=False says that this is "
        "meant.",
        UserWarning,
        stacklevel=4,
    )
