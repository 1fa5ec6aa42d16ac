"""How much memory a gated update and a whole training step need at their peak, in bytes per parameter, beside Keras's.

    python benchmarks/memory.py [--json] [--quick]

Each contender is alone in a process. `state` is what its step keeps: weights, masters and slots. `temporaries` is what
a step, compiled and warm, needs at its peak beyond what was allocated before it, as TensorFlow's allocator counts. On
CPUs that is the one it has for GPUs: its other one counts nothing, and gives no freed memory back that could be seen.

A whole step is that of a transformer, with activations and gradients among the temporaries. Keras has no masters: its
step in float16 would keep float16 weights alone, so it is measured in mixed_float16 and float32.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import statistics
from collections.abc import Callable

# Read when TensorFlow makes its devices: in the children.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"

import gate
import keras
import models
import paired
import steps
import tensorflow as tf

import loops
import scaler

COUNT, SIZE = 64, 512
CONTENDERS = {"float32": ("halfstep", gate.SCALED[0]), "float16": ("halfstep",)}
MASTERS = 4.0
TEMPORARIES = 4.0
"""One float32 copy of all gradients, the largest that a bucket can be."""
WHOLE = {"layers": 2, "width": 256, "words": 2000}
_WARM_UP, _STEPS = 4, 5


def needed(name: str, dtype: str, count: int, size: int) -> dict[str, float]:
    """Bytes per parameter of one contender, in a process that does nothing else."""
    values, weights = gate.arrays([(size, size)] * count)
    grads = [tf.constant(value, dtype) for value in values]
    make, jit = gate.CONTENDERS[name]
    return _measured(make(grads, weights, gate.OPTIMIZERS["Adam"], None, jit), count * size**2)


def whole(name: str, policy: str, quick: bool) -> dict[str, float]:
    """Bytes per parameter of a whole training step, in a process that does nothing else."""
    sizes = {"layers": 1, "width": 8, "heads": 1, "length": 4, "words": 5, "batch_size": 2} if quick else WHOLE
    problem = models.transformer(policy, **sizes)
    return _measured(tf.function(STEPS[name](problem)), problem.model.count_params())


def accumulated(problem: models.Problem) -> Callable:
    """Four micro-batches for one update."""
    step = loops.TrainStep(
        problem.model,
        problem.loss,
        keras.optimizers.Adam(1e-4),
        loss_scaler=scaler.LossScaler(scaler.Dynamic()),
        accumulate=4,
    )
    return lambda: step(problem.batch)["loss"]


STEPS = {**steps.STEPS, "halfstep, 4 micro-batches": accumulated}
STEPS_IN = {
    "float32": ("halfstep", gate.SCALED[0]),
    "mixed_float16": ("halfstep", "halfstep, 4 micro-batches", gate.SCALED[0]),
    "float16": ("halfstep", "halfstep, 4 micro-batches"),
}


def _measured(step: Callable, parameters: int) -> dict[str, float]:
    for _ in range(_WARM_UP):
        step().numpy()
    kept = sum(variable.dtype.size * variable.shape.num_elements() for variable in _variables(step))
    peaks = [_peak(step) for _ in range(_STEPS)]
    return {"state": kept / parameters, "temporaries": statistics.median(peaks) / parameters}


def run(quick: bool) -> paired.Report:
    count, size = (2, 8) if quick else (COUNT, SIZE)
    found: dict[str, dict] = {}
    for dtype, names in list(CONTENDERS.items())[: 1 if quick else None]:
        for name in names[: 1 if quick else None]:
            title = f"{name}, {dtype}{' with masters' if dtype == 'float16' else ''}"
            found[title] = _alone(needed, name, dtype, count, size)
    figures = [
        paired.Figure(f"{title}: temporaries", seen["temporaries"], None, TEMPORARIES if "halfstep" in title else None)
        for title, seen in found.items()
    ]
    if not quick:
        slots = found["halfstep, float32"]["state"] - 4.0
        masters = found["halfstep, float16 with masters"]["state"] - 2.0 - slots
        figures.append(paired.Figure("halfstep: masters of float16 weights", round(masters, 3), None, MASTERS))
    for policy, name in [
        (policy, name) for policy, names in STEPS_IN.items() for name in names[: 1 if quick else None]
    ]:
        title = f"whole step, {name}, {policy}"
        found[title] = _alone(whole, name, policy, quick)
        figures.append(paired.Figure(f"{title}: state and temporaries", sum(found[title].values())))
    return paired.Report(figures, found)


def _variables(step) -> list[tf.Variable]:
    unique = {id(variable): variable for variable in step.get_concrete_function().variables}
    return list(unique.values())


def _peak(step) -> float:
    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    tf.config.experimental.reset_memory_stats(device)
    before = tf.config.experimental.get_memory_info(device)["current"]
    step().numpy()
    return tf.config.experimental.get_memory_info(device)["peak"] - before


def _alone(function, *arguments):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


if __name__ == "__main__":
    paired.main(__doc__, "memory", run)
