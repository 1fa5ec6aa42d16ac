"""Guards that a skip is explained with the names of its own variables, also if a scaler has several `apply`."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import gradients_of, modes
from ways import graph

import scaler
from scaler.outcome.outcome import FIRST_PLACE, MOST_NAMES
from scaler.outcome.skip_sentence import Named, Names

# Each part is counted here, of which a graph warns.
pytestmark = pytest.mark.filterwarnings("ignore:apply.grads.. another apply of this function")
NAN = np.float32(np.nan)


class Parts:
    """A body of two weights and a head, each with its optimizer, and one scaler."""

    def __init__(self, head=None):
        self.loss_scaler = scaler.LossScaler(stuck=scaler.StuckPolicy(consecutive_skips=2))
        self.body = [keras.Variable([1.0], name=name) for name in ("body_kernel", "body_bias")]
        self.head = [keras.Variable([1.0], name="head_kernel")]
        self.optimizers = [keras.optimizers.SGD(0.1), head or keras.optimizers.Adam(0.1)]

    def step(self, body, head):
        variables = [*self.body, *self.head]
        grads = gradients_of(
            self.loss_scaler,
            lambda: tf.add_n([tf.reduce_sum(variable.value) for variable in variables]),
            [variable.value for variable in variables],
        )
        first = self.loss_scaler.apply(self.optimizers[0], [grads[0], grads[1] * body], self.body)
        second = self.loss_scaler.apply(self.optimizers[1], [grads[2] * head], self.head)
        return first, second

    def variables(self):
        own = [variable for optimizer in self.optimizers for variable in optimizer.variables]
        return [*self.body, *self.head, *own, *self.loss_scaler.variables]


@functools.cache
def _traced():
    parts = Parts()
    run = graph(parts.step)
    run.get_concrete_function(tf.constant(1.0), tf.constant(1.0))
    return parts, run, [np.asarray(variable) for variable in parts.variables()]


def traced():
    """Parts as they are made and their compiled step, which is traced once."""
    parts, run, start = _traced()
    for variable, value in zip(parts.variables(), start, strict=True):
        variable.assign(value)
    parts.loss_scaler.stuck = scaler.StuckPolicy(consecutive_skips=2)
    return parts, run


@modes("eager", "graph")
def test_the_variable_of_the_skip_is_named(execute):
    parts, run = traced()
    if execute is not tf.function:
        parts = Parts()
        run = execute(parts.step)
    for factors, name in (((NAN, 1.0), "body_bias"), ((1.0, NAN), "head_kernel"), ((NAN, 1.0), "body_bias")):
        outcomes = run(*map(np.float32, factors))
        assert f"gradient of {name!r}" in parts.loss_scaler.explain()
        skipped = next(outcome for outcome in outcomes if not bool(outcome.finite))
        assert parts.loss_scaler.explain(skipped) == parts.loss_scaler.explain()
        assert int(parts.loss_scaler.last_skip.index) == int(skipped.index)
        assert int(parts.loss_scaler.last_skip.name_offset) == int(skipped.name_offset)
        applied = next(outcome for outcome in outcomes if bool(outcome.finite))
        assert parts.loss_scaler.explain(applied).startswith("The step was applied")
    if execute is tf.function:  # Whose names eager mode uses too.
        parts.step(np.float32(1.0), NAN)
    assert len(parts.loss_scaler._names.lists) == 2


def test_the_error_names_it_and_the_optimizer_of_the_skip():
    parts, run = traced()
    parts.loss_scaler.stuck = scaler.StuckPolicy(consecutive_skips=1)
    run(np.float32(1.0), NAN)
    with pytest.raises(scaler.StuckError, match="head_kernel"):
        parts.loss_scaler.check()
    parts.optimizers[1].learning_rate = np.nan
    run(np.float32(1.0), np.float32(1.0))
    assert "the learning rate of Adam" in parts.loss_scaler.explain()
    assert int(parts.loss_scaler.last_skip.index) == -1


def test_a_checkpoint_keeps_whose_it_was(tmp_path):
    parts, run = traced()
    run(np.float32(1.0), NAN)
    said = parts.loss_scaler.explain()
    path = tf.train.Checkpoint(loss_scaler=parts.loss_scaler).save(str(tmp_path / "ckpt"))
    run(NAN, np.float32(1.0))
    assert parts.loss_scaler.explain() != said
    tf.train.Checkpoint(loss_scaler=parts.loss_scaler).restore(path).assert_consumed()
    assert parts.loss_scaler.explain() == said


class Apart:
    """Two functions that share a scaler, as in a program whose processes may call them in any order."""

    def __init__(self, names=("alpha", "beta", "gamma", "delta"), rate=0.1):
        self.loss_scaler = scaler.LossScaler(scaler.Static(64.0))
        variables = [keras.Variable([1.0], name=name) for name in names]
        optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(rate)]
        for optimizer, own in zip(optimizers, (variables[:2], variables[2:]), strict=True):
            optimizer.build(own)
        self.first = graph(lambda factor: self.step(optimizers[0], variables[:2], factor))
        self.second = graph(lambda factor: self.step(optimizers[1], variables[2:], factor))

    def step(self, optimizer, variables, factor):
        values = [variable.value for variable in variables]
        return self.loss_scaler.apply(
            optimizer,
            gradients_of(
                self.loss_scaler, lambda: tf.reduce_sum(values[0]) + tf.sqrt(tf.reduce_sum(values[1]) * factor), values
            ),
            variables,
        )

    def restored(self, path):
        tf.train.Checkpoint(loss_scaler=self.loss_scaler).restore(path).assert_consumed()
        return self


ONE = np.float32(1.0)
UNKNOWN = "the variable is unknown in this process until it has traced the step that was skipped"


@pytest.mark.slow
def test_a_saved_learning_rate_is_blamed_before_its_step_is_traced(tmp_path):
    before = Apart(rate=np.nan)
    before.second(ONE)
    path = tf.train.Checkpoint(loss_scaler=before.loss_scaler).save(str(tmp_path / "ckpt"))
    after = Apart().restored(path)
    assert "the learning rate of the optimizer is NaN" in after.loss_scaler.explain()
    after.second(ONE)
    assert "the learning rate of Adam is NaN" in after.loss_scaler.explain()


@pytest.mark.slow
def test_a_saved_weight_is_not_named_either(tmp_path):
    before = Apart()
    before.first(ONE)
    spoiled = keras.Variable([np.inf], name="spoiled")
    before.loss_scaler.apply(
        keras.optimizers.SGD(),
        [gradients_of(before.loss_scaler, lambda: tf.reduce_sum(spoiled.value) * 0.0, spoiled.value) * NAN],
        [spoiled],
    )
    said = before.loss_scaler.explain()
    assert "the weight 'spoiled' is already non-finite" in said
    path = tf.train.Checkpoint(loss_scaler=before.loss_scaler).save(str(tmp_path / "ckpt"))
    after = Apart().restored(path)
    after.first(ONE)
    assert f"because the loss itself was not finite; {UNKNOWN}" in after.loss_scaler.explain()


@pytest.mark.slow
def test_places_do_not_overlap_and_are_never_full():
    names = Names()
    for number in range(30):
        names.begin([Named("SGD", tuple(f"{number}/{i}" for i in range(40_000)), ())], [])
        ends = sorted((begin, begin + count) for begin, count in names.lists.items())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        assert ends[0][0] >= FIRST_PLACE
        assert ends[-1][1] <= MOST_NAMES
    own = Named("SGD", ("29/0",), ())
    assert names.of(names.begin([own], [])) == (own,)
