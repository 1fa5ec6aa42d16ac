"""What counting values by exponent costs, beside the largest magnitude of the same tensor.

    python benchmarks/observe.py [--json] [--quick]

One core. Values are those of a normal distribution, or of its positive half with zeros for the other, as after ReLU:
zeros cost another look, for subnormals among them. A third kind holds one infinity, which an overflow leaves.
"""

from __future__ import annotations

import numpy as np
import paired
import tensorflow as tf

import scaler

VALUES = 1_000_000
PER_MILLION = 1.2
"""Milliseconds for a million values, in a graph."""
SECONDS = 4.0
COUNT = {"exponents": None, "exponents, jit": True}
AMAX = {"amax": None, "amax, jit": True}


def tensors(count: int) -> dict[str, np.ndarray]:
    normal = np.random.default_rng(0).standard_normal(count, np.float32)
    infinite = normal.copy()
    infinite[0] = np.inf
    return {"normal": normal, "half of them zeros": np.maximum(normal, 0), "one infinity": infinite}


def measure(values: tf.Tensor, quick: bool) -> paired.Seconds:
    def function(of, jit):
        return tf.function(lambda: of([held]), jit_compile=jit)

    # A variable: TensorFlow would fold what it can compute of a constant.
    held = tf.Variable(values)
    contenders = {name: function(scaler.observe.exponents, jit) for name, jit in COUNT.items()}
    contenders |= {name: function(scaler.gradients.amax, jit) for name, jit in AMAX.items()}
    return paired.take_turns(contenders, SECONDS, quick)


def run(quick: bool) -> paired.Report:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    count, figures, found = 1000 if quick else VALUES, [], {}
    for kind, values in tensors(count).items():
        for dtype in ("float32", "float16", "bfloat16"):
            title = f"{count} {dtype} values, {kind}"
            taken = measure(tf.constant(values, dtype), quick)
            found[title] = paired.case(taken, "amax")
            figures.append(paired.figure(f"{title}: to amax", taken, "exponents", "amax"))
            # The least, unlike the median, does not depend on what else the machine does.
            ms = min(taken["exponents"]) * 1e3
            target = PER_MILLION if kind == "normal" else None
            figures.append(paired.Figure(f"{title}: least ms", ms, None, target))
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "observe", run)
