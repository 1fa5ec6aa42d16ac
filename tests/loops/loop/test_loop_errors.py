"""Guards that a loop which is stopped in the middle closes what is open, counts right, and can run again."""

import json

import pytest
import tensorflow as tf
from loop_cases import numbers
from mirrored import mirrored

import loops
import scaler


class Watched:
    """A context-manager action that writes down what happens to it."""

    def __init__(self, name, log, raise_at=None, error=KeyboardInterrupt):
        self.name, self.log, self.raise_at, self.error = name, log, raise_at, error

    def __enter__(self):
        self.log.append(f"{self.name} enter")
        return self

    def __exit__(self, kind, *_):
        self.log.append(f"{self.name} exit {kind.__name__ if kind else None}")

    def __call__(self, visit):
        self.log.append(f"{self.name} {visit.counters.data}")
        if visit.counters.data == self.raise_at:
            self.raise_at = None
            raise self.error("stop")


def lines(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_actions_are_called_in_order_and_left_in_reverse():
    log = []
    loop = loops.Loop(
        lambda n: {"loss": n},
        numbers(),
        steps_per_call=2,
        actions=[Watched("a", log), lambda visit: log.append("plain"), Watched("b", log)],
    )
    loop.run(3)
    assert log == ["a enter", "b enter", "a 2", "plain", "b 2", "a 3", "plain", "b 3", "b exit None", "a exit None"]


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_step_that_raises_closes_the_actions_and_the_loop_runs_on(tmp_path, steps_per_call):
    log, path = [], tmp_path / "steps.jsonl"

    def step(number):
        tf.debugging.assert_none_equal(number, 5.0, message="the fifth")
        return {"loss": number}

    file = loops.JsonLines(path)
    loop = loops.Loop(step, numbers(), steps_per_call=steps_per_call, actions=[file, Watched("a", log)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="the fifth"):
        loop.run(9)
    reported = 4 if steps_per_call == 1 else 3
    assert loop.counters == loops.Counters(4, 4, 4)
    assert lines(path) == list(range(1, reported + 1))
    assert log[-1] == "a exit InvalidArgumentError"
    with pytest.raises(RuntimeError, match="with statement"):
        file(None)
    loop.run(9)
    assert loop.counters == loops.Counters(9, 9, 9)
    # The fourth step was finished, and so it is counted, but the call that took it broke off.
    assert lines(path) == [*range(1, reported + 1), *range(5, 10)]
    assert log[-1] == "a exit None"


@pytest.mark.parametrize(("steps_per_call", "error"), [(1, KeyboardInterrupt), (2, RuntimeError)])
def test_an_action_that_raises_ends_the_run_and_the_next_one_goes_on(tmp_path, steps_per_call, error):
    log, path = [], tmp_path / "steps.jsonl"
    total = tf.Variable(0.0)
    actions = [loops.JsonLines(path), Watched("a", log, raise_at=4, error=error), Watched("b", log)]
    loop = loops.Loop(
        lambda n: {"loss": total.assign_add(n)}, numbers(), steps_per_call=steps_per_call, actions=actions
    )
    with pytest.raises(error, match="stop"):
        loop.run(8)
    assert loop.counters == loops.Counters(4, 4, 4)
    assert lines(path) == [1, 2, 3, 4]
    assert log[-2:] == [f"b exit {error.__name__}", f"a exit {error.__name__}"]
    # After an error the others still see the visit, so that what they write and a checkpoint agree; not after Ctrl-C.
    assert ("b 4" in log) == (error is RuntimeError)
    loop.run(8)
    assert lines(path) == list(range(1, 9))
    assert total.numpy() == 36


def test_of_two_actions_that_raise_at_one_visit_the_first_is_named():
    log = []
    actions = [Watched("a", log, raise_at=4, error=RuntimeError), Watched("b", log, raise_at=4, error=ValueError)]
    loop = loops.Loop(lambda n: {"loss": tf.cast(n, tf.float32)}, numbers(), steps_per_call=2, actions=actions)
    with pytest.raises(RuntimeError, match="stop"):
        loop.run(8)
    assert "b 4" in log


def test_an_action_that_cannot_be_entered_leaves_those_before_it():
    log = []

    class Shut(Watched):
        def __enter__(self):
            raise OSError("no space")

    loop = loops.Loop(lambda n: {"loss": n}, numbers(), actions=[Watched("a", log), Shut("b", log)])
    with pytest.raises(OSError, match="no space"):
        loop.run(3)
    assert log == ["a enter", "a exit OSError"]
    assert loop.counters == loops.Counters()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"steps_per_call": 0}, ["steps_per_call=0", "at least 1"]),
        ({"steps_per_call": 1.5}, ["steps_per_call=1.5", "integer"]),
        ({"steps_per_call": True}, ["steps_per_call=True", "integer"]),
        ({"steps_per_call": "auto"}, ["steps_per_call='auto'", "integer"]),
        ({"dataset": [1, 2]}, ["dataset=list", "tf.data.Dataset.from_tensor_slices"]),
        ({"train_step": None}, ["train_step=None", "callable"]),
        ({"actions": [print, "loss"]}, ["actions=['loss']", "take a Visit"]),
        ({"actions": loops.Progress()}, ["Loop(actions=", "expected a list of actions"]),
        ({"actions": [loops.Progress]}, ["actions=[Progress]", "this is its class: Progress(...)"]),
    ],
)
def test_arguments_that_cannot_work_are_named_at_once(arguments, named):
    usual = {"train_step": lambda n: {"loss": n}, "dataset": numbers()}
    with pytest.raises(scaler.InvalidArgument) as caught:
        loops.Loop(**{**usual, **arguments})
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize("steps", [0, 1.5, True, "3", None])
def test_a_number_of_steps_that_cannot_be_is_named(steps):
    with pytest.raises(scaler.InvalidArgument) as caught:
        loops.Loop(lambda n: {"loss": n}, numbers()).run(steps)
    assert f"run(steps)={steps!r}: expected an integer of at least 1." == str(caught.value)


def test_a_loop_in_the_scope_of_a_strategy_is_refused():
    dataset = tf.data.Dataset.from_tensors(1.0)
    with mirrored(2).scope(), pytest.raises(scaler.InvalidArgument, match=r"inside of MirroredStrategy\.scope\(\)"):
        loops.Loop(lambda batch: {"loss": batch}, dataset, strategy=mirrored(2))
