"""Whether XLA compiles a loop's step with `jit_compile="auto"`: by device, dtypes and step, never by a timing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

import scaler
from loops.backend.datasets import inputs
from loops.backend.steps import is_deterministic, kinds_of_operations, not_for_xla
from loops.loop.index_checks import has_sizes_of_data, looked_up
from loops.loop.state.operations import kind

AUTO = "auto"
COMPILED = (
    "XLA compiles this step, since it computes in 16 bits on a CPU, which is slower in a graph. "
    "Loop(jit_compile=False) leaves it as a graph."
)
"""What a run says, once, where the loop chose XLA by itself on a CPU."""


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


_OTHERWISE = ("Assert", "CheckNumerics", "Random", "TruncatedNormal", "Multinomial", "ParameterizedTruncatedNormal")
"""How the names of operations begin that XLA leaves out, and of those whose seed is a counter of the process there."""


def check_jit_compile(jit_compile: object) -> None:
    """Refuses what is neither a bool nor "auto"."""
    if not isinstance(jit_compile, bool) and jit_compile != AUTO:
        raise scaler.InvalidArgument(f'Loop(jit_compile={jit_compile!r}): expected True, False or "auto".')


def has_steady_rows(dataset: tf.data.Dataset | None) -> bool:
    """Whether all batches of a dataset but the last one have as many rows, as far as its operations tell.

    A source that is no dataset counts as if they had: the loop sees its batches.
    """
    while dataset is not None and kind(type(dataset).__name__) in _KEEP_ROWS and len(inputs(dataset)) == 1:
        (dataset,) = inputs(dataset)
    return dataset is None or kind(type(dataset).__name__) in _BATCH


_BATCH = ("Batch", "ParallelBatch", "MapAndBatch")
_KEEP_ROWS = ("Repeat", "Prefetch", "Take", "Skip", "Cache", "Shuffle", "Options", "Shard", "Finalize", "Model")


def may_compile(
    strategy: tf.distribute.Strategy | None, models: Iterable[Any], element_spec: Any, steady_rows: bool = True
) -> bool:
    """Whether XLA should compile the step, as far as is known before the step is traced.

    On a GPU the rule is that of Keras's `fit`: not under a `tf.distribute` strategy, not with deterministic operations,
    and not with a layer whose `supports_jit` is False. On a CPU a layer must also compute in 16 bits, and batches must
    have one shape but for the rows of the last one, since XLA compiles a step for each shape.

    Args:
        strategy: A `tf.distribute` strategy whose replicas take the step, or None.
        models: Those of the step, as far as they are known.
        element_spec: The dataset's.
        steady_rows: From `has_steady_rows`.
    """
    layers = [layer for model in models for layer in scaler.observe.layers_of(model)]
    if strategy is not None or is_deterministic():
        return False
    if not has_gpu() and not (_compute_in_16_bits(layers) and _has_one_shape(element_spec, steady_rows)):
        return False
    without = next((layer for layer in layers if not getattr(layer, "supports_jit", True)), None)
    if without is not None:
        _warn(f"its layer {without.name!r} says so (supports_jit=False)")
    return without is None


def _compute_in_16_bits(layers: Iterable[Any]) -> bool:
    # One that is not built yet may get weights.
    weighs = (layer for layer in layers if layer.variables or not layer.built)
    return any(layer.compute_dtype in ("float16", "bfloat16") for layer in weighs)


def _has_one_shape(element_spec: Any, steady_rows: bool) -> bool:
    specs = tf.nest.flatten(element_spec)
    if not all(isinstance(one, tf.TensorSpec) for one in specs):
        return False
    return all((one.shape[1:] if steady_rows else one.shape).is_fully_defined() for one in specs)


def can_be_compiled(step: tf.types.experimental.PolymorphicFunction, batch: Any) -> bool:
    """Whether XLA has a kernel for all operations of a step. What it refuses all the same shows in the first call.

    On a CPU the loop chooses XLA by itself, so XLA must not change what the step does. It would leave out assertions,
    read another row for an index outside of its range, and draw other numbers from the same seed when a program makes
    the step again. It would also compile again for each size that depends on values.

    Args:
        step: Has `jit_compile=True`.
        batch: One, or its specification.
    """
    try:
        concrete = step.get_concrete_function(batch)
        without = not_for_xla(concrete)
    except Exception:  # Of any kind: if the step itself is wrong, its next trace raises it again.
        if has_gpu():
            raise
        return False
    if without is None:
        _warn("this release of TensorFlow does not list the kernels of an operation")
    elif without:
        _warn(f"it has no kernel for {', '.join(without)}")
    elif not has_gpu():
        left_out = [one for one in kinds_of_operations(concrete) if one.startswith(_OTHERWISE)]
        return not left_out and not has_sizes_of_data(concrete) and looked_up(concrete) is not None
    return without is not None and not without


def _warn(why: str) -> None:
    """Says that a step is not compiled, on a GPU: on a CPU that is what one expects."""
    if has_gpu():
        warnings.warn(
            f"Loop: XLA cannot compile this step, since {why}. It runs without XLA. Pass jit_compile=False if this is "
            "intended.",
            UserWarning,
            stacklevel=4,
        )
