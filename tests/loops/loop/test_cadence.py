"""Guards the one meaning of `every=`: its multiples; for writers exactly, for others at the first visit after."""

import csv
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard_cases import events

import loops


@pytest.fixture
def run(tensorboard, tmp_path):
    def run(steps_per_call, every, steps):
        data = tf.data.Dataset.range(1, 1000).map(lambda number: tf.cast(number, tf.float32))
        held_out = tf.data.Dataset.from_tensors((tf.zeros([1, 1]), tf.zeros([1, 1])))
        evaluate = loops.Evaluate(
            lambda x, training: x, held_out, [keras.metrics.MeanSquaredError(name="mse")], every=every
        )
        called, evaluated = [], []
        actions = [
            loops.JsonLines(tmp_path / "lines", every=every),
            loops.Csv(tmp_path / "csv", every=every),
            evaluate,
            loops.TensorBoard(tmp_path / "board", every=every),
            loops.Call(lambda visit: called.append(visit.counters.data), every=every),
            lambda visit: evaluated.append(evaluate.step),
        ]
        loops.Loop(lambda n: {"loss": n}, data, steps_per_call=steps_per_call, actions=actions).run(steps)
        board = events(tmp_path / "board")
        return {
            "lines": [json.loads(line)["step"] for line in (tmp_path / "lines").read_text().splitlines()],
            "csv": [int(row["step"]) for row in csv.DictReader((tmp_path / "csv").read_text().splitlines())],
            "board": [step for step, _ in board.get("loss", ())],
            "values": [int(value) for _, value in board.get("loss", ())],
            "call": called,
            "evaluate": [step for step in np.unique(evaluated).tolist() if step],
            "host": [step for step, _ in board.get("scaler/skipped", ())],
        }

    return run


@pytest.mark.parametrize(("steps_per_call", "every", "steps"), [(1, 10, 40), (50, 10, 100), (7, 10, 45)])
def test_writers_write_the_multiples_and_others_act_at_the_first_visit_after(run, steps_per_call, every, steps):
    found = run(steps_per_call, every, steps)
    multiples = list(range(every, steps + 1, every))
    for writer in ("lines", "csv", "board", "values"):
        assert found[writer] == multiples, writer
    ends = [*range(steps_per_call, steps, steps_per_call), steps]
    visits = sorted({min(end for end in ends if end >= multiple) for multiple in multiples})
    for action in ("call", "evaluate", "host"):
        assert found[action] == visits, action


def test_in_seconds_each_shows_the_last_step_of_a_visit(run):
    found = run(7, loops.Seconds(0), 20)
    assert all(found[name] == [7, 14, 20] for name in ("lines", "csv", "board", "call", "evaluate", "host"))
