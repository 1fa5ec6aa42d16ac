"""Guards that a loop that chooses the steps of its calls is quick, and does at each step what every other one does."""

import csv
import functools
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from loop_cases import afresh
from tensorboard_cases import events

import loops
import scaler
from loops.loop.visit import MOST_STEPS, Pace


@pytest.fixture
def lengths(monkeypatch):
    """Gives the calls of the loops of a test the lengths of a list, in place of those that a clock would give."""

    def use(steps):
        left = iter(steps)
        monkeypatch.setattr(Pace, "record", lambda self, *_: setattr(self, "steps", next(left)))

    return use


@functools.cache
def traced(steps_per_call):
    """A step whose weight depends on the order of its batches, its traces, and loops of it."""
    weight, traces = tf.Variable(0.5), []

    def step(number):
        traces.append(number)
        return {"loss": weight.assign(0.9 * weight + tf.sin(tf.cast(number, tf.float32)))}

    return weight, traces, afresh(step, tf.data.Dataset.range(1), steps_per_call=steps_per_call)


def trained(steps, *, actions=(), steps_per_call=None):
    """Runs the step from its start, and returns the loop and the bits it comes to."""
    weight, traces, again = traced(steps_per_call)
    loop = again(tf.data.Dataset.range(32).shuffle(32, seed=3).repeat(), *actions)
    loop.run(steps)
    assert len(traces) == 1
    return loop, weight.numpy().tobytes()


@pytest.fixture(scope="module")
def whole():
    """The bits that 60 steps come to, in calls of seven."""
    return trained(60, steps_per_call=7)[1]


def test_the_first_calls_take_one_step_and_then_calls_grow_until_they_last():
    chosen = Pace(None)
    taken = []
    for _ in range(9):
        taken.append(chosen.steps)
        chosen.record(chosen.steps, 60.0 if len(taken) == 1 else chosen.steps * 1e-3)
    assert taken == [1, 1, 4, 16, 64, 250, 250, 250, 250]
    chosen.record(250, 2.5)
    assert chosen.steps == 25


def test_slow_steps_are_taken_one_by_one_and_fast_ones_within_bounds():
    slow, fast = Pace(None), Pace(None)
    for _ in range(20):
        slow.record(slow.steps, 3.0 * slow.steps)
        fast.record(fast.steps, 0.0)
    assert (slow.steps, fast.steps) == (1, MOST_STEPS)


def test_a_given_number_stays():
    given_one = Pace(7)
    for seconds in (0.0, 100.0):
        given_one.record(7, seconds)
    assert (given_one.limit(0, 100, []), given_one.limit(98, 100, [])) == (7, 2)


@given(
    every=st.lists(st.integers(1, 60), max_size=3),
    goal=st.integers(1, 200),
    lengths=st.lists(st.integers(1, MOST_STEPS), min_size=1, max_size=20),
)
def test_no_call_passes_a_step_at_which_an_action_acts(every, goal, lengths):
    acted = {one: [] for one in every}
    actions = [loops.Call(lambda visit, one=one: acted[one].append(visit), every=one) for one in every]
    chosen, done, visited = Pace(None), 0, []
    while done < goal:
        chosen.steps = lengths[len(visited) % len(lengths)]
        taken = chosen.limit(done, goal, actions)
        assert 1 <= taken <= chosen.steps
        done += taken
        visited.append(done)
    assert visited[-1] == goal
    for one in every:
        assert set(range(one, goal + 1, one)) <= set(visited)


@pytest.mark.parametrize("names", [0, 9, 10])
def test_an_action_that_names_a_step_of_the_past_does_not_stop_the_loop(names):
    action = types.SimpleNamespace(next_visit=lambda done: names)
    assert Pace(None).limit(10, 100, [action]) == 1


def test_calls_of_any_lengths_give_the_same_bits(lengths, whole):
    lengths([3, 1, 50, 2] * 30)
    assert trained(60)[1] == whole


def test_actions_act_at_the_same_steps_whatever_the_speed(lengths, tmp_path):
    def steps_of(name):
        folder, called, stops = tmp_path / name, [], []
        loop, _ = trained(
            37,
            actions=[
                loops.Call(lambda visit: called.append(visit.counters.data), every=6),
                loops.Checkpoint(folder / "checkpoints", every=10, keep=10),
                loops.JsonLines(folder / "steps.jsonl"),
                loops.StopWhen(lambda visit: visit.counters.data >= 33, every=11),
                lambda visit: stops.append(visit.counters.data),
            ],
        )
        rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        saved = sorted(path.name for path in (folder / "checkpoints").glob("ckpt-*.index"))
        return rows, called, saved, loop.counters.data

    lengths([100] * 99)
    quick = steps_of("quick")
    lengths([1] * 99)
    assert steps_of("slow") == quick
    assert quick[1:] == ([6, 12, 18, 24, 30], [f"ckpt-{n}.index" for n in (10, 20, 30, 33)], 33)


def test_a_resumed_run_ends_with_the_same_bits(lengths, whole, tmp_path):
    lengths([1, 4, 16, 64] * 9)
    trained(20, actions=[loops.Checkpoint(tmp_path / "checkpoints", every=20)])
    lengths([5] * 99)
    assert trained(60, actions=[loops.Checkpoint(tmp_path / "checkpoints", every=20, resume=True)])[1] == whole


def test_an_action_of_the_user_names_its_next_step(lengths):
    seen = []

    class AtSquares:
        def next_visit(self, done):
            return (int(done**0.5) + 1) ** 2

        def __call__(self, visit):
            seen.append(visit.counters.data)

    lengths([100] * 99)
    loops.Loop(lambda n: {"loss": n}, tf.data.Dataset.range(100), actions=[AtSquares()]).run(30)
    assert seen == [1, 4, 9, 16, 25, 30]


@pytest.mark.parametrize("step", [12.5, 12.0, np.float32(12), "12", True, [12]], ids=repr)
def test_an_action_that_names_no_step_is_refused_by_its_name(step):
    class Mine:
        def next_visit(self, done):
            return step

        def __call__(self, visit):
            pass

    loop = loops.Loop(lambda n: {"loss": n}, tf.data.Dataset.range(100), actions=[Mine()])
    with pytest.raises(
        scaler.InvalidArgument, match=r"^Mine\.next_visit\(0\) returned .*(12|True).*: expected .* an integer, or None"
    ):
        loop.run(20)
    assert loop.counters.data == 0


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint8], ids=lambda kind: kind.__name__)
def test_an_action_may_name_its_step_as_any_integer(kind):
    action = types.SimpleNamespace(next_visit=lambda done: kind(13))
    chosen = Pace(None)
    chosen.steps = 50
    assert chosen.limit(10, 100, [action]) == 3
    assert type(chosen.limit(10, 100, [action])) is int


def test_a_profile_begins_and_ends_where_it_says(lengths, monkeypatch, tmp_path):
    lengths([100] * 99)
    marks, visits = [], []
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda folder: marks.append(visits[-1] if visits else 0))
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: marks.append(visits[-1]))
    actions = [lambda visit: visits.append(visit.counters.data), loops.Profile(tmp_path / "p", first=10, steps=5)]
    loops.Loop(lambda n: {"loss": n}, tf.data.Dataset.range(100), actions=actions).run(40)
    assert marks == [10, 15]


class TestStepsThatNeedTheirShapes:
    def step(self, x):
        return {"loss": tf.reduce_sum(tf.reshape(x, [x.shape[0] * 2, -1]))}

    def test_run_one_by_one_and_say_why(self):
        data = tf.data.Dataset.from_tensor_slices(np.ones([20, 4], np.float32)).batch(8)
        visits = []
        loop = loops.Loop(self.step, data, actions=[visits.append])
        with pytest.warns(UserWarning, match="unknown shape .*NoneType.* takes one step.* steps_per_call=1") as said:
            loop.run(3)
        assert [float(visit.outputs["loss"][0]) for visit in visits] == [32.0, 32.0, 16.0]
        assert loop.steps_per_call == 1
        assert said[0].filename == __file__

    def test_run_in_the_graph_where_the_shape_is_known(self, recwarn):
        data = tf.data.Dataset.from_tensor_slices(np.ones([64, 4], np.float32)).batch(8, drop_remainder=True)
        loop = loops.Loop(self.step, data)
        loop.run(8)
        assert loop.steps_per_call is None
        assert not recwarn

    def test_an_error_of_the_step_itself_is_its_own(self):
        def broken(x):
            raise ValueError(f"of rank {x.shape.rank}")

        data = tf.data.Dataset.from_tensor_slices(np.ones([20, 4], np.float32)).batch(8)
        with pytest.raises(ValueError, match="of rank 2"):
            loops.Loop(broken, data).run(3)


def test_functions_that_run_eagerly_are_called_one_by_one():
    tf.config.run_functions_eagerly(True)
    try:
        loop = loops.Loop(lambda n: {"loss": float(n)}, tf.data.Dataset.range(10))
        with pytest.warns(UserWarning, match="runs functions eagerly"):
            loop.run(3)
    finally:
        tf.config.run_functions_eagerly(False)
    assert loop.counters.data == 3


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


@pytest.mark.parametrize(("steps_per_call", "every", "steps"), [(50, 10, 100), (7, 10, 45)])
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
