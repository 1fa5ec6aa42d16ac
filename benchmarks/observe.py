"""What observing costs: counting values by exponent beside their largest magnitude, and probes beside a plain step.

    python benchmarks/observe.py [--json] [--quick]

One core. Values are those of a normal distribution, or of its positive half with zeros for the other, as after ReLU:
zeros cost another look, for subnormals among them. A third kind holds one infinity, which an overflow leaves.

The steps are those of the transformer with four layers and of the digits CNN, in float32, in a `Loop` with twenty of
them a call. A contender takes twenty at a time, so that what is done at every tenth counts as often as it is done. A
`Trace` has the runs of one file, whose last histograms are written once, at the end. Two bounds are of the same probes:
"read once" finds the largest magnitude of each tensor and counts nothing; "counted once" counts the eight bits of the
exponent with TensorFlow's kernel, looks at nothing twice, and finds no largest magnitude.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import pathlib
import tempfile
import warnings
from collections.abc import Callable
from unittest import mock

import keras
import models
import numpy as np
import paired
import tensorflow as tf

import loops
import scaler
from scaler import observe

# By its name: the package also has a function that is called so.
MEASURING = importlib.import_module("scaler.observe.exponents")
VALUES = 1_000_000
PER_MILLION = 1.2
"""Milliseconds for a million values, in a graph."""
SECONDS = 4.0
STEPS = 20
WATCHES = {
    "weight gradients": (None, {"kinds": ["weight_gradients"]}, False),
    "all": (1.3, {}, False),
    "all, Trace": (1.3, {}, True),
    "all, every 10th step": (1.05, {"every": 10}, False),
    "all, every 10th step, Trace": (1.05, {"every": 10}, True),
    "ready probes, every 10th step": (1.05, {"every": 10, "kinds": ["attention", "update_rms"]}, False),
}
"""Targets, what is watched, and whether a `Trace` writes it."""
BOUNDS = {"": {}, ", every 10th step": {"every": 10}}
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


MODELS = {
    "transformer of 4 layers": models.transformer,
    "digits CNN": functools.partial(models.digits_cnn, batch_size=128),
}
QUICK_MODELS = {"transformer of 1 layer": functools.partial(models.transformer, layers=1, width=8, length=4, words=10)}


def step_of(make: Callable[[str], models.Problem], arguments: dict | None) -> tuple[loops.TrainStep, tuple]:
    """A train step, watched or not, and its batch."""
    keras.utils.set_random_seed(0)
    problem = make("float32")
    # The CNN has no attention, and says so.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        probes = None if arguments is None else observe.watch(problem.model, **arguments)
        step = loops.TrainStep(problem.model, problem.loss, keras.optimizers.Adam(1e-4), probes=probes)
    return step, problem.batch


def steps_of(make: Callable[[str], models.Problem], arguments: dict | None, trace: pathlib.Path | None) -> Callable:
    """Twenty further steps in a loop, whose actions are those of one run."""
    step, batch = step_of(make, arguments)
    seen = loops.Trace(trace) if trace else None
    loop = loops.Loop(step, tf.data.Dataset.from_tensors(batch).repeat(), steps_per_call=STEPS)
    entered: list[loops.Trace] = []
    done = itertools.count(STEPS, STEPS)

    def call() -> None:
        if seen and not entered:
            seen.begin(loop)
            entered.append(seen.__enter__())
            # As an action it would open and close its file at each call.
            loop.actions = [seen.__call__]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            loop.run(next(done))

    return call


def read_once(tensors: list[list]) -> tuple[tf.Tensor, tf.Tensor]:
    """In the place of `counts_and_largest`: each value is read once, for the largest magnitude."""
    largest = [tf.reduce_max([scaler.gradients.amax([one]) for one in row]) for row in tensors]
    return tf.zeros([len(tensors), observe.BINS], tf.int64), tf.stack(largest)


def counted_once(tensors: list[list]) -> tuple[tf.Tensor, tf.Tensor]:
    """In the place of `counts_and_largest`: TensorFlow's own kernel counts the exponents of all values, no more."""

    def count(values: tf.Tensor) -> tf.Tensor:
        field = tf.bitwise.right_shift(tf.bitcast(tf.reshape(values, [-1]), tf.uint32), tf.constant(23, tf.uint32))
        return tf.raw_ops.DenseBincount(input=tf.bitcast(field, tf.int32), size=512, weights=tf.constant([], tf.int64))

    counts = tf.stack([tf.add_n([count(one) for one in row]) for row in tensors])
    return counts[:, : observe.BINS], tf.zeros([len(tensors)])


def bound(make: Callable[[str], models.Problem], arguments: dict, measure: Callable) -> Callable:
    """Twenty steps whose probes measure as `measure` does."""
    steps = steps_of(make, arguments, None)
    with mock.patch.object(MEASURING, "counts_and_largest", measure):
        steps()  # Which traces.
    return steps


def operations(step: loops.TrainStep, batch: tuple) -> int:
    return len(tf.function(step).get_concrete_function(batch).graph.get_operations())


def probes(quick: bool) -> tuple[list[paired.Figure], dict]:
    figures, cases = [], {}
    for title, make in (QUICK_MODELS if quick else MODELS).items():
        with tempfile.TemporaryDirectory() as folder:
            contenders = {PLAIN: steps_of(make, None, None)}
            for name, (_, arguments, traced) in WATCHES.items():
                path = pathlib.Path(folder) / f"{name}.arrow" if traced else None
                contenders[name] = steps_of(make, arguments, path)
            bounds = {
                f"all{when}, {measure.__name__.replace('_', ' ')}": bound(make, arguments, measure)
                for when, arguments in BOUNDS.items()
                for measure in (read_once, counted_once)
            }
            contenders |= bounds
            taken = paired.take_turns(contenders, 10 * SECONDS, quick)
        cases[f"twenty steps, {title}, float32"] = paired.case(taken, PLAIN)
        for name, (target, *_) in WATCHES.items():
            figures.append(paired.figure(f"{title}, {name}: to {PLAIN}", taken, name, PLAIN, target))
        figures += [paired.figure(f"{title}, {name}: to {PLAIN}", taken, name, PLAIN) for name in bounds]
        keras.backend.clear_session()
    make = next(iter(QUICK_MODELS.values()))
    off, batch = step_of(make, {})
    off.probes = None
    more = operations(off, batch) - operations(*step_of(make, None))
    return [*figures, paired.Figure(f"{OFF}: operations more", more, None, 0)], cases


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
