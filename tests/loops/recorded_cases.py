"""Runs that were never trained: what the actions write of steps that a test makes up."""

import contextlib
import json
import pathlib
import types

import keras
import numpy as np

import loops
from loops.record.log import columns_in
from loops.support.json_values import without_nan

NAMES = ("activations/dense", "activation_gradients/dense", "weight_gradients/dense/kernel")


def write_run(
    folder,
    steps=60,
    skips=(3, 4),
    names=NAMES,
    trace=True,
    log=True,
    loss=lambda step: 3.0 / step,
    scale=lambda step: 2.0**15,
    amax=lambda step, place: 2.0 ** (place % 9 + 1),
    dtype="float16",
):
    """Writes `trace.arrow` and `steps.jsonl` of a run; the skips are overflows of each gradient."""
    folder = pathlib.Path(folder)
    layer = keras.layers.Dense(1, dtype="mixed_float16" if dtype == "float16" else dtype, name="dense")
    model = keras.Sequential([keras.Input([2]), layer])
    seen = {name.partition("/")[2]: (dtype,) for name in names if not name.startswith("weight")}
    probes = types.SimpleNamespace(names=list(names), model=model, dtypes=seen)
    probes = probes if names else None
    actions = [loops.Trace(folder / "trace.arrow", every=20, window=2)] if trace else []
    actions += [loops.JsonLines(folder / "steps.jsonl")] if log else []
    for action in actions:
        step, counters = types.SimpleNamespace(probes=probes), types.SimpleNamespace(data=0)
        action.begin(types.SimpleNamespace(train_step=step, actions=actions, counters=counters))
    with contextlib.ExitStack() as stack:
        for action in actions:
            stack.enter_context(action)
        for first in range(1, steps + 1, 10):
            visited = visit(np.arange(first, min(first + 10, steps + 1)), skips, names, loss, scale, amax)
            for action in actions:
                action(visited)
        for action in actions[:trace]:
            action.end()
    return folder


def visit(at, skips, names, loss, scale, amax):
    skipped = np.isin(at, list(skips))
    carries = np.array(["gradients" in name for name in names], bool)
    largest = np.array([[amax(step, place) for place in range(len(names))] for step in at.tolist()], np.float32)
    largest = np.where(skipped[:, None] & carries, np.inf, largest)
    counts = np.zeros([len(at), len(names), 280], np.int64)
    counts[:, :, 150] = 7
    counts[:, :, 145] = 2
    counts[:, :, 0] = 1
    counts[:, :, 278] = (skipped[:, None] & carries) * 5
    outputs = {
        "loss": np.array([loss(step) for step in at.tolist()]),
        "applied": ~skipped,
        "attempted": np.ones(len(at), bool),
        "loss_scale": np.array([scale(step) for step in at.tolist()]),
    }
    last = int(at[-1])
    vectors = {"counts": counts, "amax": largest} if names else {}
    return loops.Visit(loops.Counters(last, last, last), outputs, 0.0, last, vectors)


def steps_of(rows):
    """The table of steps that a log with these rows is read as."""
    return columns_in([json.dumps(without_nan(row)) for row in rows], comma=False)
