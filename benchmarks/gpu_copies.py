"""What a step copies between a GPU and its host and how often it waits, by TensorFlow's profiler, beside the audit.

    python benchmarks/gpu_copies.py [--json] [--quick]

`tests/device/audit.py` reads a traced step: each branch that it executes waits for its predicate, one copy to the host,
and no tensor of more than 1,024 elements is in the host's memory. Here such steps run, ten of each. What the same step
without a scaler does is taken off. The status is 1 if a step does more than the audit says.
"""

from __future__ import annotations

import pathlib
import sys

import keras
import models
import paired
import steps
import tensorflow as tf
from profiled import profiled

import scaler

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "device"))
from audit import LARGEST, audit

LARGEST_BYTES = 8 * LARGEST
STRATEGIES = {
    "Dynamic": scaler.Dynamic,
    "Headroom": scaler.Headroom,
    "Histogram": scaler.Histogram,
    "LogNormal": scaler.LogNormal,
    "DelayedAmax": scaler.DelayedAmax,
    "Smooth": scaler.Smooth,
}
OPTIONS = {
    "masters": ("float16", {}),
    "stochastic rounding": ("float16", {"masters": scaler.weights.StochasticRounding}),
    "Kahan's sums": ("float16", {"masters": scaler.weights.KahanWeights}),
    "clipped": ("mixed_float16", {"clip_norm": 1.0}),
    "4 micro-batches, clipped": ("mixed_float16", {"accumulate": 4, "clip_norm": 1.0}),
}
"""A policy and arguments of a `TrainStep`."""


def problem(policy: str, quick: bool) -> models.Problem:
    """With variables and activations beyond what the audit calls large."""
    return models.tiny(policy) if quick else models.resnet(policy, filters=(64, 128), size=16, batch_size=32)


def contenders(quick: bool) -> dict[str, tf.types.experimental.PolymorphicFunction]:
    """The step without a scaler first, and with Keras's."""
    made = {name: steps.STEPS[name](problem("mixed_float16", quick)) for name in ("no scaler", steps.KERAS)}
    strategies = dict(list(STRATEGIES.items())[: 1 if quick else None])
    for name, strategy in strategies.items():
        made[name] = steps.halfstep(problem("mixed_float16", quick), scaler.LossScaler(strategy()))
    for name, (policy, arguments) in list(OPTIONS.items())[: 1 if quick else None]:
        made[name] = steps.halfstep(problem(policy, quick), **arguments)
    return {name: tf.function(step) for name, step in made.items()}


def run(quick: bool) -> paired.Report:
    made = contenders(quick)
    seen = {name: profiled(step) for name, step in made.items()}
    plain, figures = seen["no scaler"], []
    for name in list(made)[1:]:
        found = seen[name]
        # Keras's scaler is there to compare with: nothing is claimed of it.
        waits = None if name == steps.KERAS else audit(made[name].get_concrete_function()).predicates
        for what, value, target in (
            ("copies to the host", found.to_host - plain.to_host, waits),
            ("waits for the GPU", found.waits - plain.waits, waits),
            ("copies to the GPU", found.to_device - plain.to_device, None),
            ("bytes of the largest copy", found.largest, None if waits is None else LARGEST_BYTES),
        ):
            figures.append(paired.Figure(f"{name}: {what}", value, None, target))
    keras.backend.clear_session()
    return paired.Report(figures, {f"a step, {name}": found._asdict() for name, found in seen.items()})


if __name__ == "__main__":
    sys.exit(any(entry.reached is False for entry in paired.main(__doc__, "gpu_copies", run).figures))
