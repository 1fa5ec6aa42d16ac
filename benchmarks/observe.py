"""What observing costs: counting values by exponent beside their largest magnitude, and probes beside a plain step.

    python benchmarks/observe.py [--json] [--quick]

One core. Values are those of a normal distribution, or of its positive half with zeros for the other, as after ReLU:
zeros cost another look, for subnormals among them. A third kind holds one infinity, which an overflow leaves.

The steps are those of the transformer with four layers, in float32. A contender takes ten at a time, so that what is
done at every tenth counts as often as it is done.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import models
import numpy as np
import paired
import tensorflow as tf

import loops
import scaler
from scaler import observe

VALUES = 1_000_000
PER_MILLION = 1.2
"""Milliseconds for a million values, in a graph."""
SECONDS = 4.0
STEPS = 10
WATCHES = {
    "histograms of weight gradients": (1.10, {"kinds": ["weight_gradients"]}),
    "histograms of weight gradients, every 10th step": (1.02, {"kinds": ["weight_gradients"], "every": STEPS}),
    "amax of all activations and gradients": (1.03, {"every": 2**30}),
    "histograms of all activations and gradients": (None, {}),
    "histograms of all activations and gradients, every 10th step": (1.03, {"every": STEPS}),
}
"""Targets, and what is watched."""
PLAIN, OFF = "no probes", "probes turned off"
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


def step_of(arguments: dict | None, quick: bool) -> loops.TrainStep:
    """A train step of the transformer, watched or not."""
    keras.utils.set_random_seed(0)
    small = {"layers": 1, "width": 8, "length": 4, "words": 10}
    problem = models.transformer("float32", **(small if quick else {}))
    probes = None if arguments is None else observe.watch(problem.model, **arguments)
    step = loops.TrainStep(problem.model, problem.loss, keras.optimizers.Adam(1e-4), probes=probes)
    step.batch = problem.batch
    return step


def ten_steps(step: loops.TrainStep) -> Callable[[], tf.Tensor]:
    compiled = tf.function(step)

    def call() -> tf.Tensor:
        for _ in range(STEPS):
            outputs = compiled(step.batch)
        return outputs["loss"]

    return call


def operations(step: loops.TrainStep) -> int:
    return len(tf.function(step).get_concrete_function(step.batch).graph.get_operations())


def probes(quick: bool) -> tuple[list[paired.Figure], dict]:
    contenders = {PLAIN: ten_steps(step_of(None, quick))}
    contenders |= {name: ten_steps(step_of(arguments, quick)) for name, (_, arguments) in WATCHES.items()}
    taken = paired.take_turns(contenders, 10 * SECONDS, quick)
    figures = [
        paired.figure(f"{name}: to {PLAIN}", taken, name, PLAIN, target) for name, (target, _) in WATCHES.items()
    ]
    off = step_of({}, quick)
    off.probes = None
    more = operations(off) - operations(step_of(None, quick))
    figures.append(paired.Figure(f"{OFF}: operations more", more, None, 0))
    return figures, {"ten steps of a transformer, float32": paired.case(taken, PLAIN)}


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
    of_steps, cases = probes(quick)
    return paired.Report([*figures, *of_steps], found | cases)


if __name__ == "__main__":
    paired.main(__doc__, "observe", run)
