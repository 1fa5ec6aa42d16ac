"""How much of a step's cost is there to take away: the same with the cause left out, beside ours and beside Keras.

    python benchmarks/bounds.py [--json] [--quick]

"The least" is a loss scaler by hand: a fixed scale, one norm, one branch around Keras's own update. Nothing is counted,
explained or put back, and the scale never moves. No checked step can be expected to be faster. "Remembers nothing" is
our optimizer with its memory left out: it scales, checks, unscales and updates, but moves no scale, counts no step and
notes no loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import gate
import keras
import models
import paired
import steps
import tensorflow as tf
from fit import MODELS as FIT_MODELS
from fit import OURS, PROTECTED, THEIRS, contender
from loop import BATCH_SIZE, STEPS, fit, loop

import loops
import loops.tasks
from scaler.gate.state import StoredState
from scaler.misuse.open_step import OpenStep

LEAST, LEAST_JIT = "the least", "the least, jit"
OURS_GATE, OURS_GATE_JIT = "halfstep", "halfstep, jit"
FORGETS = "halfstep that remembers nothing"
SCALE = 2.0**10
SECONDS = 3.0


def update(optimizer, grads, variables) -> tf.Tensor:
    """Moves the variables if the gradients of the scaled loss are finite, and says whether they were."""
    finite = tf.math.is_finite(tf.linalg.global_norm(grads))

    def applied():
        optimizer.apply([grad / tf.cast(SCALE, grad.dtype) for grad in grads], variables)
        return tf.constant(True)

    return tf.cond(finite, applied, lambda: tf.constant(False))


def least(problem: models.Problem) -> Callable:
    model, (x, y), optimizer = problem.model, problem.batch, keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = problem.loss(y, model(x, training=True))
            scaled = loss * SCALE
        update(optimizer, tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def of_a_step(quick: bool, found: dict) -> list[paired.Figure]:
    figures = []
    for jit in (False, True)[: 1 if quick else 2]:
        made = {**{name: steps.STEPS[name] for name in ("halfstep", "no scaler")}, LEAST: least}
        batch_size = 2 if quick else 128
        contenders = {
            name: tf.function(step(models.digits_cnn("mixed_float16", batch_size)), jit_compile=jit or None)
            for name, step in made.items()
        }
        taken = paired.take_turns(contenders, SECONDS, quick)
        title = f"digits CNN, mixed_float16, {'jit' if jit else 'graph'}"
        found[title] = paired.case(taken, "no scaler")
        figures += [
            paired.figure(f"{title}: {name} to no scaler", taken, name, "no scaler") for name in ("halfstep", LEAST)
        ]
        keras.backend.clear_session()
    return figures


def bare_loop(make_model, policy, dataset, taken: int, move=None, **arguments) -> Callable[[], None]:
    """A `Loop` whose step has no scaler. It returns its loss, and whether `move` applied it where it has one."""
    model, optimizer = make_model(policy), keras.optimizers.Adam(1e-3)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        if move is not None:
            return {"loss": loss, "applied": move(optimizer, grads, model.trainable_variables)}
        optimizer.apply(grads, model.trainable_variables)
        return {"loss": loss}

    made = loops.Loop(step, dataset, **arguments)
    return lambda: made.run(made.counters.data + taken)


def of_a_loop(quick: bool, found: dict) -> list[paired.Figure]:
    taken_steps = 6 if quick else STEPS
    many = taken_steps // 3
    task = loops.tasks.load("digits")
    chosen = {
        "Loop": (loop, {"steps_per_call": many}),
        "Loop, the least": (bare_loop, {"steps_per_call": many, "move": update}),
        "Loop, no scaler": (bare_loop, {"steps_per_call": many}),
        "Loop, a visit at each step": (loop, {"steps_per_call": 1}),
        "Loop, the least, a visit at each step": (bare_loop, {"steps_per_call": 1, "move": update}),
        "Loop, no scaler, a visit at each step": (bare_loop, {"steps_per_call": 1}),
        "fit": (fit, {}),
        f"fit, {many} steps per execution": (fit, {"steps_per_execution": many, "jit_compile": False}),
    }
    taken = paired.take_turns(
        {
            name: make(models.digits_mlp, "float32", task.dataset(BATCH_SIZE, seed=0), taken_steps, **arguments)
            for name, (make, arguments) in chosen.items()
        },
        SECONDS,
        quick,
    )
    found["digits MLP, float32"] = paired.case(taken, "fit")
    keras.backend.clear_session()
    pairs = [(name, "fit" if "visit" in name else f"fit, {many} steps per execution") for name in chosen]
    figures = []
    for name, reference in pairs[:6]:
        value, quartiles = paired.ratio(taken, reference, name)
        title = f"digits MLP, float32: {name}, times as fast as {reference}"
        figures.append(paired.Figure(title, value, quartiles, at_least=True))
    return figures


def least_gate(grads, weights, make_optimizer, clip, jit) -> Callable:
    """Scaled gradients to updated weights by hand, with masters for float16."""
    own = [tf.Variable(value, dtype=grad.dtype) for value, grad in zip(weights, grads, strict=True)]
    masters = [tf.Variable(value) for value in weights] if grads[0].dtype == tf.float16 else own
    optimizer = make_optimizer()
    optimizer.build(masters)

    def step():
        wide = [tf.cast(grad, tf.float32) / SCALE for grad in grads]
        norm = tf.linalg.global_norm(wide)
        finite = tf.math.is_finite(norm)

        def applied():
            optimizer.apply([grad * (clip / tf.maximum(norm, clip)) for grad in wide] if clip else wide, masters)
            for variable, master in zip(own, masters, strict=True):
                if variable is not master:
                    variable.assign(tf.cast(master, variable.dtype))
            return tf.constant(True)

        return tf.cond(finite, applied, lambda: tf.constant(False))

    return tf.function(step, jit_compile=jit or None)


def of_the_gate(quick: bool, found: dict) -> list[paired.Figure]:
    size = next(iter(gate.QUICK_SIZES if quick else gate.SIZES))
    shapes = {**gate.SIZES, **gate.QUICK_SIZES}[size]
    values, weights = gate.arrays(shapes)
    figures = []
    for dtype, clip in (("float32", 1.0), ("float16", None)):
        grads = [tf.constant(value, dtype) for value in values]
        make = gate.OPTIMIZERS["SGD momentum"]
        contenders = {
            OURS_GATE: gate.ours(grads, weights, make, clip, False),
            OURS_GATE_JIT: gate.ours(grads, weights, make, clip, True),
            **{
                name: gate.keras_scaled(grads, weights, make, clip, jit)
                for name, jit in zip(gate.SCALED, (False, True), strict=True)
            },
            **{name: least_gate(grads, weights, make, clip, jit) for name, jit in ((LEAST, False), (LEAST_JIT, True))},
        }
        taken = paired.take_turns(contenders, SECONDS, quick)
        theirs = paired.best(taken, gate.SCALED)
        title = f"gate, {size}, SGD momentum, {dtype}{', clipped' if clip else ''}"
        found[title] = paired.case(taken, theirs)
        figures += [
            paired.figure(f"{title}: {name} to {theirs}", taken, name, theirs)
            for name in (OURS_GATE, LEAST, OURS_GATE_JIT, LEAST_JIT)
        ]
        keras.backend.clear_session()
    return figures


class Least(keras.Model):
    """A model whose `fit` takes the least step, and updates its metrics where the step is applied."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
            scaled = loss * SCALE
        variables = self.trainable_variables
        finite = update(self.optimizer, tape.gradient(scaled, variables), variables)
        tf.cond(finite, lambda: self._loss_tracker.update_state(loss), lambda: None)
        return self.get_metrics_result()


def least_fit(make: Callable, steps_in_a_turn: int, **arguments) -> Callable[[], object]:
    problem = make("mixed_float16")
    inputs = keras.Input(problem.model.input_shape[1:])
    model = Least(inputs, problem.model(inputs))
    model.compile(
        keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **arguments
    )
    model.optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensors(problem.batch).repeat()
    return lambda: model.fit(dataset, steps_per_epoch=steps_in_a_turn, shuffle=False, verbose=0)


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name in ((StoredState, "move"), (OpenStep, "begin"), (OpenStep, "end")):
            stack.enter_context(mock.patch.object(owner, name, return_value=None))
        yield


def forgetful_fit(make: Callable, steps_in_a_turn: int, **arguments) -> Callable[[], object]:
    turn = contender(make, OURS, steps_in_a_turn, **arguments)
    with forgetting():
        turn()  # It is traced now.
    return turn


def of_fit(quick: bool, found: dict) -> list[paired.Figure]:
    figures = []
    make, count = FIT_MODELS["digits MLP"]
    count = 4 if quick else count
    settings = {"graph": {}, "jit": {"jit_compile": True}, "50 steps per execution": {"steps_per_execution": 50}}
    for setting, arguments in list(settings.items())[: 1 if quick else None]:
        arguments = {"jit_compile": False, **arguments}
        contenders = {side: contender(make, side, count, **arguments) for side in (OURS, PROTECTED, THEIRS)}
        contenders[FORGETS] = forgetful_fit(make, count, **arguments)
        contenders[LEAST] = least_fit(make, count, **arguments)
        taken = paired.take_turns(contenders, SECONDS, quick)
        title = f"digits MLP, mixed_float16, fit, {setting}"
        found[title] = paired.case(taken, THEIRS, steps_in_a_turn=count)
        figures += [
            paired.figure(f"{title}: {side} to Keras's", taken, side, THEIRS)
            for side in (OURS, PROTECTED, FORGETS, LEAST)
        ]
        keras.backend.clear_session()
    return figures


def run(quick: bool) -> paired.Report:
    found: dict[str, dict] = {}
    figures = [figure for part in (of_a_step, of_a_loop, of_fit, of_the_gate) for figure in part(quick, found)]
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "bounds", run)
