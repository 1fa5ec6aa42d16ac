"""Guards runs of a `ComposedStep`: resumed in the middle of a turn, on replicas, with windows, and explained."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from composed_cases import Players, dataset
from loop_cases import afresh
from mirrored import mirrored
from models import batch, one_layer, squared_error
from rigs import raw
from step_cases import part

import loops
import scaler
from loops.step.parts import Turns

FAULTS = ((2, "critic"), (4, "actor"))


DECISIONS = ("critic/applied", "actor/applied", "actor/attempted", "applied", "cause", "variable")


@pytest.mark.exhaustive
def test_two_replicas_take_the_step_of_one():
    """Each has the same rows, so that BatchNorm sees the same."""
    arguments = {"every": 2, "dropout": 0.0, "momentum": 0.5}
    one, strategy = Players("turns", **arguments), mirrored(2)
    with strategy.scope():
        two = Players("turns", **arguments)
    halves = dataset(4, bad=FAULTS, size=4)
    doubled = halves.map(lambda *parts: tuple(tf.concat([part, part], axis=0) for part in parts))
    seen = []
    loops.Loop(two.step, doubled, steps_per_call=4, strategy=strategy, actions=[seen.append]).run(4)
    for row, half in enumerate(halves):
        expected = one.step(half)
        assert [seen[0].outputs[name][row] for name in DECISIONS] == [expected[name].numpy() for name in DECISIONS]
    pairs = [(two.teacher.variables, one.teacher.variables)]
    pairs += [(two.held(name), one.held(name)) for name in ("critic", "actor")]
    for own, other in pairs:
        for ours, theirs in zip(own, other, strict=True):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_turn(tmp_path):
    """It has a bad batch for each player."""
    players, data = Players("turns", "float16", every=3, momentum=0.9), dataset(8, bad=((2, "critic"), (6, "actor")))
    again = afresh(players.step, data, steps_per_call=2, jit_compile=False)
    places = [tmp_path / "one", tmp_path / "two"]

    def loop(place):
        return again(data, loops.JsonLines(place / "steps.jsonl"), loops.Checkpoint(place / "c", every=4, resume=True))

    whole = loop(places[0])
    whole.run(4)
    shutil.copytree(*places)
    whole.run(8)
    own = [*players.variables(), *players.teacher.variables]
    expected = raw(own)
    loop(places[1]).run(8)
    assert raw(own) == expected
    logs = [(place / "steps.jsonl").read_text() for place in places]
    assert logs[0] == logs[1]
    rows = [json.loads(line) for line in logs[0].splitlines()]
    assert [row["actor/attempted"] for row in rows] == [step % 3 == 0 for step in range(1, 9)]
    assert [row["applied"] for row in rows] == [step not in (2, 6) for step in range(1, 9)]
    assert rows[1]["cause"] == rows[5]["cause"] == "LOSS"
    assert rows[1]["variable"].startswith("critic/")
    assert rows[5]["variable"].startswith("actor/")
    assert id(players.step.weights[rows[5]["variable"]]) in map(id, players.actor.trainable_variables)


@pytest.mark.exhaustive
def test_explain_names_the_layer_of_the_part_whose_turn_it_was():
    """The second part overflows float16 in its forward pass, at every second call; the first one always moves."""

    def model(name, dtype, kernel):
        start = keras.initializers.Constant(kernel)
        dense = keras.layers.Dense(1, name="grows", dtype=dtype, kernel_initializer=start)
        return keras.Sequential([keras.Input([1]), dense], name=name)

    def loss(one):
        return lambda x: tf.reduce_mean(tf.cast(one(x), tf.float32))

    first, second = model("first", "float32", 1.0), model("second", "mixed_float16", 300.0)
    parts = [
        loops.Part("small", first, loss(first), keras.optimizers.SGD(1e-3)),
        loops.Part("large", second, loss(second), keras.optimizers.SGD(1e-3), every=2),
    ]
    explain = loops.Explain(seconds=0.0)
    data = tf.data.Dataset.from_tensors(tf.fill([2, 1], 300.0)).repeat()
    loops.Loop(loops.ComposedStep(parts), data, steps_per_call=1, actions=[explain]).run(2)
    (found,) = explain.explanations
    assert (found.step, found.verdict, found.layer) == (2, "loss", "second/grows")
    assert "second/grows" in found.sentence
    assert "weights that have moved since, by 1 update." in found.differs


class Pair:
    """Two layers with a loss each, of one forward pass."""

    def __init__(self, one_scaler=False, **arguments):
        self.models = one_layer(), one_layer()
        every = arguments.pop("every", 1)
        parts = [
            part("first", self.models[0], lambda both: both[0]),
            part("second", self.models[1], lambda both: both[1], every=every),
        ]
        arguments |= {"loss_scaler": scaler.LossScaler(scaler.Dynamic(2.0**6))} if one_scaler else {}
        self.step = loops.ComposedStep(parts, self.losses, **arguments)

    def losses(self, given):
        x, y = given
        first = self.models[0](x)
        return squared_error(y, first), squared_error(2.0 * first, self.models[1](x))

    def variables(self):
        return [*self.models[0].variables, *self.models[1].variables]


def halves(given):
    return [tuple(one[half] for one in given) for half in (slice(0, 4), slice(4, 8))]


@pytest.mark.slow
def test_a_window_is_the_large_batch():
    """Of two equal halves: their losses are means."""
    large, windows = Pair(every=2), Pair(every=2, accumulate=2)
    for number in (1, 2):
        half = tuple(one[:4] for one in batch(number))
        expected = large.step(tuple(tf.concat([one, one], axis=0) for one in half))
        first, second = (windows.step(half) for _ in range(2))
        assert not first["attempted"]
        for name in ("attempted", "applied", "first/applied", "second/attempted", "second/applied"):
            assert bool(second[name]) == bool(expected[name]), (number, name)
        assert bool(second["second/applied"]) == (number % 2 == 0)
    for one, other in zip(large.variables(), windows.variables(), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("one_scaler", [False, True])
def test_a_bad_micro_batch_skips_the_windows_of_the_parts_that_it_is_in(one_scaler):
    pair = Pair(one_scaler, accumulate=2)
    x, y = map(np.copy, batch(0))
    y[0] = np.inf  # In the first loss of the first half.
    before = [raw(model.variables) for model in pair.models]
    outputs = [pair.step(half) for half in halves((x, y))]
    assert [bool(one["attempted"]) for one in outputs] == [False, True]
    assert not outputs[1]["first/applied"]
    assert bool(outputs[1]["second/applied"]) != one_scaler
    assert raw(pair.models[0].variables) == before[0]
    assert (raw(pair.models[1].variables) == before[1]) == one_scaler
    for half in halves(batch(1)):
        outputs = pair.step(half)
    assert outputs["applied"]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_nearest_turn_is_the_last_one_or_else_the_first(window, every):
    turns = Turns(window)
    due = []
    for _ in range(4 * every * window):
        due.append(bool(turns.due(every)))
        turns.end()
    turns.go_back(len(due))
    for call, now in enumerate(due):
        past = [one for one in range(call) if due[one]]
        # Of a window the last micro-batch, which decides.
        first = next(one for one, turn in enumerate(due) if turn) + window - 1
        expected = 0 if now else (past[-1] if past else first) - call
        assert turns.nearest(every) == expected, call
        turns.end()
