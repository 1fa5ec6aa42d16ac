"""Step time, peak memory and synchronisations on a GPU, by number format, without a scaler, with Keras's and with ours.

    python benchmarks/gpu.py [--json] [--quick]

A ResNet-style CNN and a transformer in float32, TF32, mixed_float16, mixed_bfloat16 and float16 with masters, in a
graph and compiled by XLA. `make gpu` runs it, with all else that is for a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import keras
import models
import paired
import steps
import tensorflow as tf
from profiled import profiled

MODELS = {
    "ResNet": models.resnet,
    "transformer": functools.partial(models.transformer, width=512, heads=8, length=256, words=8000, batch_size=32),
}
QUICK_MODELS = {"two dense layers": models.tiny}
MASTERS, MIXED = "float16 with masters", "mixed_float16"
FORMATS = {
    "float32": ("float32", False),
    "TF32": ("float32", True),
    MIXED: ("mixed_float16", False),
    "mixed_bfloat16": ("mixed_bfloat16", False),
    MASTERS: ("float16", False),
}
"""A policy, and whether TensorFlow may use TF32."""
QUICK_FORMATS = (MIXED, MASTERS)
PLAIN, KERAS, OURS = "no scaler", steps.KERAS, "halfstep"
TARGET = 1.03
SECONDS = 10.0


def contender(make_model: Callable, number_format: str, side: str, jit: bool) -> Callable[[], tf.Tensor]:
    policy, tf32 = FORMATS[number_format]
    step = tf.function(steps.STEPS[side](make_model(policy)), jit_compile=jit or None)

    def take() -> tf.Tensor:
        # Kernels choose when they run, XLA when it compiles.
        tf.config.experimental.enable_tensor_float_32_execution(tf32)
        return step()

    return take


def measure(make_model: Callable, formats: Iterable[str], jit: bool, quick: bool) -> tuple[paired.Seconds, dict]:
    """Times of the formats with each scaler and without, and for each its memory and synchronisations."""
    made, seen = {}, {}
    for chosen, side in itertools.product(formats, (PLAIN, KERAS, OURS)):
        if chosen == MASTERS and side != OURS:
            continue  # Nobody else has masters.
        name = f"{chosen}, {side}"
        made[name] = contender(make_model, chosen, side, jit)
        found = profiled(made[name])
        seen[name] = {"peak_bytes": peak_bytes(made[name]), "synchronisations": found.to_host + found.waits}
    return paired.take_turns(made, SECONDS, quick), seen


def peak_bytes(step: Callable) -> int | None:
    """What a warm step needs beyond what was there before it: activations, gradients and temporaries."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = tf.config.experimental.get_memory_info("GPU:0")["current"]
    step().numpy()
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] - before


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    chosen_models, formats = (QUICK_MODELS, QUICK_FORMATS) if quick else (MODELS, FORMATS)
    modes = (True,) if quick else (False, True)
    for (model, make_model), jit in itertools.product(chosen_models.items(), modes):
        taken, seen = measure(make_model, formats, jit, quick)
        title = f"{model}, {'jit' if jit else 'graph'}"
        found[title] = paired.case(taken, next(iter(taken)), by_contender=seen)
        for chosen in formats:
            figures += compared(f"{title}, {chosen}", chosen, taken, seen)
        keras.backend.clear_session()
    return paired.Report(figures, found)


def compared(title: str, chosen: str, taken: paired.Seconds, seen: dict[str, dict]) -> list[paired.Figure]:
    """Ours to none and to Keras's; masters to mixed precision, which computes in float16 as well."""
    ours, beside = f"{chosen}, {OURS}", MIXED if chosen == MASTERS else chosen
    plain, other = f"{beside}, {PLAIN}", f"{beside}, {KERAS}"
    added = seen[ours]["synchronisations"] - seen[plain]["synchronisations"]
    figures = [
        paired.figure(f"{title}: to {plain}", taken, ours, plain, TARGET),
        paired.figure(f"{title}: to {other}", taken, ours, other),
        paired.Figure(f"{title}: synchronisations added", added, None, 0.0),
    ]
    if seen[ours]["peak_bytes"] is not None:
        memory = seen[ours]["peak_bytes"] / seen[plain]["peak_bytes"]
        figures.append(paired.Figure(f"{title}: peak memory to {plain}", memory))
    return figures


if __name__ == "__main__":
    paired.main(__doc__, "gpu", run)
