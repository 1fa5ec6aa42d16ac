"""What the gate decides by sizes that were tuned on CPUs, both ways: joining small variables, compiling, selecting.

    python benchmarks/gpu_choices.py [--json] [--quick]

The update alone with Adam, of float32 weights and of float16 ones with masters, in a graph. A contender is traced while
what `scaler/gate/joined.py` and `scaler/gate/propose.py` decide by is set otherwise. Selecting and branching are
compared where `LossScaler` takes `select`, in the update and in whole steps. Ratios are to what the gate chooses by
itself. `make gpu` runs it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable
from unittest import mock

import gate
import gpu
import keras
import paired
import steps
import tensorflow as tf

import scaler
from scaler.gate import joined, propose

NOTHING, CPUS, ALL = (0, 1), (2**11, 2**14), (2**40, 2**40)
"""What `joined.limits` returns: elements of a variable that is joined, and of a chunk."""


def joining(limits: tuple[int, int]) -> tuple:
    return joined, "limits", lambda: limits


CHOICES: dict[str, list[tuple]] = {
    "nothing joined": [joining(NOTHING)],
    "joined as on CPUs": [joining(CPUS)],
    "joined up to 2^16 elements in chunks of 2^16": [joining((2**16, 2**16))],
    "all joined": [joining(ALL)],
    "all compiled": [joining(NOTHING), (propose, "_WORTH_COMPILING", 1)],
    "all compiled in one call": [joining(NOTHING), (propose, "_WORTH_COMPILING", 1), (propose, "_MOST", 1)],
    "nothing joined or compiled": [joining(NOTHING), (propose, "_WORTH_COMPILING", 2**62)],
}
QUICK_CHOICES = ("nothing joined", "all compiled")
SELECTS = {"selecting": True, "branching": False} if "select" in inspect.signature(scaler.LossScaler).parameters else {}
CHOSEN = "as chosen"
SECONDS = 5.0


def update(grads: list, weights: list, settings: list[tuple], **arguments) -> Callable[[], tf.Tensor]:
    """The gate, traced under settings that are not its own."""
    own = [tf.Variable(value, dtype=grad.dtype) for value, grad in zip(weights, grads, strict=True)]
    masters = scaler.MasterWeights(own) if grads[0].dtype == tf.float16 else None
    optimizer, loss_scaler = keras.optimizers.Adam(1e-3), scaler.LossScaler(**arguments)
    optimizer.build(masters.weights if masters else own)
    step = tf.function(lambda: loss_scaler.apply(optimizer, grads, masters or own).finite)
    with contextlib.ExitStack() as stack:
        for setting in settings:
            stack.enter_context(mock.patch.object(*setting))
        return step.get_concrete_function()


def updates(quick: bool) -> dict[str, paired.Seconds]:
    """Times of one update under every choice, by variables and their dtype."""
    sizes, choices = (gate.QUICK_SIZES, QUICK_CHOICES) if quick else (gate.SIZES, CHOICES)
    taken = {}
    for (size, shapes), dtype in itertools.product(sizes.items(), ("float16",) if quick else ("float16", "float32")):
        values, weights = gate.arrays(shapes)
        grads = [tf.constant(value, dtype) for value in values]
        made = {CHOSEN: update(grads, weights, [])}
        made.update({name: update(grads, weights, CHOICES[name]) for name in choices})
        made.update({name: update(grads, weights, [], select=select) for name, select in SELECTS.items()})
        made[steps.KERAS] = gate.keras_scaled(grads, weights, gate.OPTIMIZERS["Adam"], None, False)
        taken[f"{size}, {dtype}"] = paired.take_turns(made, SECONDS, quick)
        keras.backend.clear_session()
    return taken


def whole_steps(quick: bool) -> dict[str, paired.Seconds]:
    """Times of a step that selects and of one that branches, by model and mode."""
    taken = {}
    for (name, make), jit in itertools.product((gpu.QUICK_MODELS if quick else gpu.MODELS).items(), (False, True)):
        made = {CHOSEN: steps.halfstep(make("mixed_float16"))}
        for title, select in SELECTS.items():
            made[title] = steps.halfstep(make("mixed_float16"), scaler.LossScaler(select=select))
        made[steps.KERAS] = steps.keras_scaled(make("mixed_float16"))
        made = {side: tf.function(step, jit_compile=jit or None) for side, step in made.items()}
        taken[f"{name}, mixed_float16, {'jit' if jit else 'graph'}"] = paired.take_turns(made, SECONDS, quick)
        keras.backend.clear_session()
    return taken


def run(quick: bool) -> paired.Report:
    taken = {**updates(quick), **(whole_steps(quick) if SELECTS else {})}
    figures = [
        paired.figure(f"{title}: {name}", times, name, CHOSEN)
        for title, times in taken.items()
        for name in times
        if name != CHOSEN
    ]
    return paired.Report(figures, {title: paired.case(times, CHOSEN) for title, times in taken.items()})


if __name__ == "__main__":
    paired.main(__doc__, "gpu_choices", run)
