"""Guards runs of a `ComposedStep`: resumed in the middle of a turn, on replicas, with windows, and explained."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from composed_cases import Players, dataset
from mirrored import mirrored
from rigs import raw
from step_cases import afresh

import loops

FAULTS = ((2, "critic"), (4, "actor"))


DECISIONS = ("critic/applied", "actor/applied", "actor/attempted", "applied", "cause", "variable")


@pytest.mark.slow_with("turns-2")
@pytest.mark.exhaustive_with("shared-1", "one scaler-1", "turns-2")
@pytest.mark.parametrize(("shape", "every"), [("turns", 2), ("shared", 1), ("one scaler", 1)])
def test_two_replicas_take_the_step_of_one(shape, every):
    """Each has the same rows, so that BatchNorm sees the same."""
    arguments = {"every": every, "dropout": 0.0, "momentum": 0.5}
    one, strategy = Players(shape, **arguments), mirrored(2)
    with strategy.scope():
        two = Players(shape, **arguments)
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
