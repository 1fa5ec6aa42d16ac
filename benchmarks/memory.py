"""How much memory a gated step needs at its peak, in bytes per parameter, beside Keras's.

    python benchmarks/memory.py [--json] [--quick]

Each contender is alone in a process. `state` is what its step keeps: weights, masters and slots. `temporaries` is what
a step, compiled and warm, needs at its peak beyond what was allocated before it, as TensorFlow's allocator counts. On
CPUs that is the one it has for GPUs: its other one counts nothing, and gives no freed memory back that could be seen.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import statistics

# Read when TensorFlow makes its devices: in the children.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"

import gate
import paired
import tensorflow as tf

COUNT, SIZE = 64, 512
DTYPES = ("float32", "float16")
CONTENDERS = ("halfstep", gate.SCALED[0], gate.SCALED[1], gate.PLAIN[0])
MASTERS = 4.0
TEMPORARIES = 4.0
"""One float32 copy of all gradients, the largest that a bucket can be."""
_WARM_UP, _STEPS = 3, 5


def needed(name: str, dtype: str, count: int, size: int) -> dict[str, float]:
    """Bytes per parameter of one contender, in a process that does nothing else."""
    values, weights = gate.arrays(count, size)
    grads = [tf.constant(value, dtype) for value in values]
    make, jit = gate.CONTENDERS[name]
    step = make(grads, weights, gate.OPTIMIZERS["Adam"], None, jit)
    for _ in range(_WARM_UP):
        step().numpy()
    kept = sum(variable.dtype.size * variable.shape.num_elements() for variable in _variables(step))
    peaks = [_peak(step) for _ in range(_STEPS)]
    parameters = count * size**2
    return {"state": kept / parameters, "temporaries": statistics.median(peaks) / parameters}


def run(quick: bool) -> paired.Report:
    count, size = (2, 8) if quick else (COUNT, SIZE)
    found: dict[str, dict] = {}
    for dtype in DTYPES[:1] if quick else DTYPES:
        for name in CONTENDERS[:1] if quick else CONTENDERS:
            title = f"{name}, {dtype}{' with masters' if dtype == 'float16' and 'halfstep' in name else ''}"
            found[title] = _alone(needed, name, dtype, count, size)
    figures = [
        paired.Figure(f"{title}: temporaries", seen["temporaries"], None, TEMPORARIES if "halfstep" in title else None)
        for title, seen in found.items()
    ]
    if not quick:
        slots = found[f"{gate.PLAIN[0]}, float32"]["state"] - 4.0
        masters = found["halfstep, float16 with masters"]["state"] - 2.0 - slots
        figures.append(paired.Figure("halfstep: masters of float16 weights", round(masters, 3), None, MASTERS))
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
