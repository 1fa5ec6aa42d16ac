"""Step time, peak memory and host synchronisations on a GPU, by number format, with and without our scaler.

    python benchmarks/gpu.py [--json] [--quick]

A ResNet-style CNN and a transformer in float32, TF32, mixed_float16 and mixed_bfloat16. Without a GPU it says so.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Callable

import keras
import models
import paired
import steps
import tensorflow as tf

MODELS = {
    "ResNet": models.resnet,
    "transformer": functools.partial(models.transformer, width=512, heads=8, length=256, words=8000, batch_size=32),
}
FORMATS = {
    "float32": ("float32", False),
    "TF32": ("float32", True),
    "mixed_float16": ("mixed_float16", False),
    "mixed_bfloat16": ("mixed_bfloat16", False),
}
SIDES = ("no scaler", "halfstep")
TARGET = 1.03
SECONDS = 10.0
_PROFILED = 10
_WAITS = ("MemcpyD2H", "cuMemcpyDtoH", "StreamSynchronize", "EventSynchronize", "CtxSynchronize")


def contender(make_model: Callable, number_format: str, side: str, jit: bool) -> Callable[[], tf.Tensor]:
    policy, tf32 = FORMATS[number_format]
    step = tf.function(steps.STEPS[side](make_model(policy)), jit_compile=jit or None)

    def take() -> tf.Tensor:
        # Kernels choose when they run, XLA when it compiles.
        tf.config.experimental.enable_tensor_float_32_execution(tf32)
        return step()

    return take


def measure(make_model: Callable, jit: bool, quick: bool) -> tuple[paired.Seconds, dict[str, dict]]:
    """Times of all formats with and without a scaler, and for each its memory and synchronisations."""
    names = {f"{chosen}, {side}": (chosen, side) for chosen, side in itertools.product(FORMATS, SIDES)}
    made, seen = {}, {}
    for name, (chosen, side) in names.items():
        made[name] = contender(make_model, chosen, side, jit)
        made[name]().numpy()
        seen[name] = {"peak_bytes": peak_bytes(made[name]), "synchronisations": synchronisations(made[name])}
    return paired.take_turns(made, SECONDS, quick), seen


def peak_bytes(step: Callable) -> int | None:
    """What a warm step needs beyond what was there before it: activations, gradients and temporaries."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = tf.config.experimental.get_memory_info("GPU:0")["current"]
    step().numpy()
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] - before


def synchronisations(step: Callable) -> float:
    """Copies from the device to the host, and waits for the device, that the profiler sees in one step.

    The result is read after the last step alone, so that only what a step does by itself is counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            for _ in range(_PROFILED):
                result = step()
        result.numpy()
        return sum(map(_waits, pathlib.Path(folder).rglob("*.xplane.pb"))) / _PROFILED


def _waits(path: pathlib.Path) -> int:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    return sum(
        any(word in plane.event_metadata[event.metadata_id].name for word in _WAITS)
        for plane in space.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        for event in line.events
    )


def run(quick: bool) -> paired.Report:
    if not tf.config.list_physical_devices("GPU"):
        print("TensorFlow sees no GPU here: nothing was measured.", file=sys.stderr)
        return paired.Report([], {})
    figures, found = [], {}
    for (model, make_model), jit in itertools.product(MODELS.items(), (False, True)):
        taken, seen = measure(make_model, jit, quick)
        title = f"{model}, {'jit' if jit else 'graph'}"
        found[title] = paired.case(taken, "float32, no scaler", by_contender=seen)
        for chosen in FORMATS:
            ours, plain = f"{chosen}, halfstep", f"{chosen}, no scaler"
            figures.append(paired.figure(f"{title}, {chosen}: to no scaler", taken, ours, plain, TARGET))
            added = seen[ours]["synchronisations"] - seen[plain]["synchronisations"]
            figures.append(paired.Figure(f"{title}, {chosen}: synchronisations added", added, None, 0.0))
            memory = seen[ours]["peak_bytes"] / seen[plain]["peak_bytes"]
            figures.append(paired.Figure(f"{title}, {chosen}: peak memory to no scaler", memory))
        keras.backend.clear_session()
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "gpu", run)
