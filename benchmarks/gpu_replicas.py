"""Replicas on all GPUs: what overflows on one is skipped on all, every bit stays, and what that costs.

    python benchmarks/gpu_replicas.py [--json] [--quick]

A `MirroredStrategy` over all GPUs, whose sums NCCL takes, with the models and the faults of `tests/distributed`. Where
there is one GPU it is the only replica. The status is 1 if a bit moved.
"""

from __future__ import annotations

import functools
import pathlib
import sys

import keras
import models
import paired
import replicas
import tensorflow as tf

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "distributed"))
import replica_cases as cases

STAND_INS = 2
SECONDS = 6.0
RIGS = {
    "a loop in the graph": ("float16", {"steps_per_call": 5}),
    "jit": ("float16", {"jit_compile": True}),
    "float32, clipped": ("float32", {"clip_norm": 1.0}),
}
"""A number format and arguments."""


def devices() -> list[str]:
    """All GPUs; logical CPUs where there is none."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * STAND_INS)
    return [f"GPU:{index}" for index in range(len(gpus))] or [f"CPU:{index}" for index in range(STAND_INS)]


def spoiled(rig: cases.Rig, where: str, replica: int) -> tuple[bool, bool]:
    """Whether steps that a replica spoils leave every bit, and whether good ones after them train all alike."""
    rig.reset()
    before = cases.raw(rig.moved())
    bad = cases.spoil(cases.batch(1, rig.size), where, replica, rig.replicas)
    applied = rig.run([bad] * 5)["applied"]
    kept = not applied.any() and cases.raw(rig.moved()) == before
    applied = rig.run([cases.batch(2, rig.size)] * 5)["applied"]
    return kept, bool(applied.all()) and cases.agree(rig.weights()) and cases.finite(rig.variables())


def run(quick: bool) -> paired.Report:
    names = devices()
    strategy, figures = tf.distribute.MirroredStrategy(names), []
    for title, (kind, arguments) in list(RIGS.items())[: 1 if quick else None]:
        model = functools.partial(cases.stateful_model, kind)
        rig = cases.Rig(strategy, model, keras.optimizers.Adam, kind=kind, size=4 * len(names), **arguments)
        places = ("gradients", "data") if kind == "float32" else ("gradients", "forward", "data")
        results = [spoiled(rig, where, replica) for where in places for replica in range(len(names))]
        kept, trained = zip(*results, strict=True)
        figures.append(paired.Figure(f"{title}: spoiled steps that moved a bit", kept.count(False), None, 0))
        figures.append(paired.Figure(f"{title}: good steps after them that failed", trained.count(False), None, 0))
    sides, network = ("halfstep", replicas.KERAS, replicas.PLAIN), models.tiny if quick else models.resnet
    make = functools.partial(network, "mixed_float16")
    made = {side: replicas.contender(strategy, side, make) for side in sides}
    taken = paired.take_turns(made, SECONDS, quick, threads=1)
    for other in sides[1:]:
        figures.append(paired.figure(f"to {other}", taken, "halfstep", other))
    alone = "There is one GPU: what several do together was skipped, and one replica runs on it."
    about = {"replicas": ", ".join(names), **({"skipped": alone} if len(names) == 1 else {})}
    return paired.Report(figures, {"devices": about, "a step on each": paired.case(taken, replicas.PLAIN)})


if __name__ == "__main__":
    sys.exit(any(entry.reached is False for entry in paired.main(__doc__, "gpu_replicas", run).figures))
