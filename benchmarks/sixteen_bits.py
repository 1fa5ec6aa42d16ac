"""What 16 bits give on this processor: a `Loop` with nothing set, in a graph and compiled by XLA, beside float32.

    python benchmarks/sixteen_bits.py [--json] [--quick]

A turn is ten steps of a loop, on a batch that stays where it is. `TF_ENABLE_ONEDNN_OPTS=0` shows what oneDNN gives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import keras
import models
import paired
import tensorflow as tf

import loops
import scaler

STEPS = 10
SECONDS = 4.0
TARGET = 1.3
MODELS = {
    "MLP 64-256-256-10": models.mlp,
    "CNN of 4 blocks": models.small_cnn,
    "transformer of 2 layers": functools.partial(
        models.transformer, layers=2, width=64, length=32, words=100, batch_size=16
    ),
}
POLICIES = ("mixed_float16", "mixed_bfloat16", "float16")
AUTO, GRAPH, XLA = "Loop with nothing set", "in a graph", "compiled by XLA"
WAYS = {AUTO: "auto", GRAPH: False, XLA: True}


def contender(make: Callable[[str], models.Problem], policy: str, jit_compile: object) -> Callable[[], object]:
    problem = make(policy)
    step = loops.TrainStep(
        problem.model, problem.loss, keras.optimizers.Adam(1e-3), loss_scaler=scaler.LossScaler(scaler.Dynamic(1024.0))
    )
    data = tf.data.Dataset.from_tensors(problem.batch).repeat()
    loop = loops.Loop(step, data, steps_per_call=STEPS, jit_compile=jit_compile)
    goals = itertools.count(STEPS, STEPS)
    return lambda: loop.run(next(goals)).data


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    chosen = {"MLP 64-256-256-10": MODELS["MLP 64-256-256-10"]} if quick else MODELS
    for (name, make), policy in itertools.product(chosen.items(), POLICIES[:1] if quick else POLICIES):
        contenders = {way: contender(make, policy, chosen) for way, chosen in WAYS.items()}
        contenders |= {f"float32, {way}": contender(make, "float32", WAYS[way]) for way in (GRAPH, XLA)}
        taken = paired.take_turns(contenders, SECONDS, quick, threads=1)
        title = f"{name}, {policy}"
        base = paired.best(taken, (one for one in contenders if one.startswith("float32")))
        fastest = paired.best(taken, (GRAPH, XLA))
        found[title] = paired.case(taken, base, steps_in_a_turn=STEPS)
        figures.append(paired.figure(f"{title}: {AUTO}, to the fastest way ({fastest})", taken, AUTO, fastest, TARGET))
        for way in (GRAPH, XLA):
            figures.append(paired.figure(f"{title}: {way}, to the fastest float32", taken, way, base))
        keras.backend.clear_session()
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "sixteen_bits", run)
