"""Guards `ComposedStep`: it is the step by hand, and a fault skips the part that it is in, or all, and nothing else."""

import dataclasses
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from composed_cases import SHAPES, ByHand, Players, batches, dataset
from rigs import assert_finite, raw

import loops
import scaler

STEPS = 5
FAULTS = ((2, "critic"), (4, "actor"))
"""The actor takes its turn at every second step."""


MODES = ["eager", "graph", "loop", "xla"]


def outputs_of(players, mode, count=STEPS, **arguments):
    """The outputs of each step, taken in one of the modes of a step."""
    if mode == "loop":
        seen = []
        loops.Loop(players.step, dataset(count, **arguments), steps_per_call=3, actions=[seen.append]).run(count)
        rows = [(one.outputs, row) for one in seen for row in range(len(one.outputs["applied"]))]
        return [{name: column[row] for name, column in columns.items()} for columns, row in rows]
    step = players.step if mode == "eager" else tf.function(players.step, jit_compile=mode == "xla")
    return [step(tuple(map(tf.constant, one))) for one in batches(count, **arguments)]


@pytest.mark.exhaustive_with(
    *(f"turns-2-{mode}" for mode in MODES[1:]),
    *(f"{shape}-{mode}" for shape in ("turns-1", "shared-2", "one scaler-1") for mode in MODES),
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("shape", "every"), [("turns", 2), ("turns", 1), ("shared", 2), ("one scaler", 1)])
def test_it_is_the_step_by_hand(shape, every, mode):
    """In float32, where a fault skips the part that it is in, or both where one scaler decides."""
    arguments = {"every": every, "clip_norm": 0.01, "dropout": 0.0 if mode == "xla" else 0.25}
    players, other = Players(shape, **arguments), ByHand(shape, **arguments)
    outputs = outputs_of(players, mode, bad=FAULTS)
    for number, (one, given) in enumerate(zip(outputs, batches(STEPS, FAULTS), strict=True), 1):
        bad = [part for place, part in FAULTS if place == number]
        skipped = ["critic", "actor"] if bad and shape == "one scaler" else bad
        losses = other.take(given, number, skipped)
        for name, loss in losses.items():
            np.testing.assert_allclose(one[f"{name}/loss"], np.nan if loss is None else loss, rtol=1e-4, atol=1e-6)
            turn = name == "critic" or number % every == 0
            assert bool(one[f"{name}/applied"]) == (turn and name not in skipped)
        assert bool(one["applied"]) == (not bad)
    for name in ("critic", "actor"):
        for ours, theirs in zip(players.held(name), other.held(name), strict=True):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.exhaustive_with("shared-graph", "one scaler-graph", "turns-eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_fault_in_float16_skips_the_part_it_is_in_bit_for_bit(shape, mode):
    players = Players(shape, "mixed_float16")
    step = players.step if mode == "eager" else tf.function(players.step)
    clean, *bad = (tuple(map(tf.constant, one)) for one in batches(3, ((2, "critic"), (3, "actor"))))
    step(clean)
    for name, other, given in zip(("critic", "actor"), ("actor", "critic"), bad, strict=True):
        together = shape == "one scaler"
        # In turns the critic's pass has moved the statistics of the actor before.
        held = players.weights if shape == "turns" and name == "actor" else players.held
        before, rest = raw(held(name)), raw(players.held(other))
        scales = {part: float(one.loss_scale) for part, one in players.step.scalers.items()}
        outputs = step(given)
        assert not outputs[f"{name}/applied"]
        assert bool(outputs[f"{other}/applied"]) != together
        assert raw(held(name)) == before
        assert (raw(players.held(other)) == rest) == together
        # Bad data costs no scale, neither its own part's nor another's.
        assert {part: float(one.loss_scale) for part, one in players.step.scalers.items()} == scales
        assert int(outputs["cause"]) == scaler.Cause.LOSS
        assert list(players.step.weights)[int(outputs["variable"])].startswith(f"{name}/")
        assert step(clean)["applied"]
    assert_finite(players.variables())
    assert mode == "eager" or step.experimental_get_tracing_count() == 1


def test_the_outputs_carry_the_names_of_the_parts():
    (outputs,) = outputs_of(Players("shared"), "eager", 1)
    own = ["loss", "attempted", "applied", "grad_norm", "clipped_norm", "loss_scale"]
    names = [f"critic/{name}" for name in (*own, "value")] + [f"actor/{name}" for name in own]
    assert list(outputs) == [*names, "attempted", "applied", "cause", "variable"]
    assert all(value.shape.rank == 0 for value in outputs.values())


def test_a_loss_is_not_looked_at_where_it_is_not_the_turn_of_its_part():
    players = Players("shared", every=2)
    outputs_of(players, "eager", 2, bad=((1, "actor"),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        players.step.check()
    assert int(players.step.scalers["actor"].counters.applied) == 1


@tf.custom_gradient
def broken(x):
    return x, lambda upstream: upstream * np.inf


@pytest.mark.exhaustive
def test_turns_of_a_table_and_of_a_variable_whose_backward_pass_is_at_fault():
    """A branch around sparse gradients."""
    table, number = keras.layers.Embedding(4, 2), tf.Variable(1.0, name="number")
    table.build()
    start = table.embeddings.numpy()
    parts = [
        loops.Part("table", table, lambda ids: tf.reduce_sum(table(ids)), keras.optimizers.SGD(0.5), every=2),
        loops.Part("number", number, lambda ids: broken(number), keras.optimizers.SGD(0.5), every=2),
    ]
    scalers = [dataclasses.replace(part, loss_scaler=scaler.LossScaler(name=part.name)) for part in parts]
    step = tf.function(loops.ComposedStep(scalers))
    ids = tf.constant([1, 1, 3])
    assert not step(ids)["attempted"]
    assert table.embeddings.numpy().tobytes() == start.tobytes()
    outputs = step(ids)
    np.testing.assert_array_equal(table.embeddings.numpy(), start - np.float32([[0], [1], [0], [0.5]]))
    assert outputs["table/applied"]
    assert not outputs["number/applied"]
    assert outputs["cause"] == scaler.Cause.OVERFLOW
    assert outputs["variable"] == 1
    assert number.numpy() == 1.0
