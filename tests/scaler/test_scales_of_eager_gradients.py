"""Guards that eager gradients are unscaled by the scale that scaled their own loss, or refused, in whatever order."""

import contextlib
import itertools

import keras
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scaler_cases import plain_descent

import scaler

INITIAL = 2.0**10


class Program:
    """Two weights with losses whose gradients are 1 and 3, under a scale that moves at every step."""

    TRUE = (1.0, 3.0)

    def __init__(self):
        self.loss_scaler = scaler.LossScaler(scaler.Dynamic(INITIAL, growth_interval=1))
        self.weights = [tf.Variable([0.0]), tf.Variable([0.0])]
        self.taped: list = []
        self.kept: list = []

    def scale(self, which):
        with tf.GradientTape() as tape:
            scaled = self.loss_scaler.scale(tf.reduce_sum(self.TRUE[which] * self.weights[which]))
        self.taped.append((which, tape, scaled))

    def differentiate(self, at, computes_on):
        which, tape, scaled = self.taped.pop(at % len(self.taped))
        (grad,) = tape.gradient(scaled, [self.weights[which]])
        self.kept.append((which, grad * 1.0 if computes_on else grad))

    def unscale(self, count):
        taken, self.kept = self.kept[:count], self.kept[count:]
        found = self.loss_scaler.unscale([grad for _, grad in taken])
        assert [float(grad[0]) for grad in found] == [self.TRUE[which] for which, _ in taken]

    def apply(self, count):
        taken, self.kept = self.kept[:count], self.kept[count:]
        for which in {which for which, _ in taken}:
            before = float(self.weights[which][0])
            grad = next(grad for one, grad in taken if one == which)
            self.loss_scaler.apply(plain_descent, [grad], [self.weights[which]])
            assert before - float(self.weights[which][0]) == self.TRUE[which]

    def apply_both(self):
        taken, self.kept = dict(self.kept[:2]), self.kept[2:]
        before = [float(weight[0]) for weight in self.weights]
        self.loss_scaler.apply(plain_descent, list(taken.values()), [self.weights[which] for which in taken])
        for which in taken:
            assert before[which] - float(self.weights[which][0]) == self.TRUE[which]

    def update(self, finite):
        self.loss_scaler.update(scaler.Event(tf.constant(finite)))


ACTIONS = st.one_of(
    st.tuples(st.just("scale"), st.integers(0, 1)),
    st.tuples(st.just("differentiate"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("unscale"), st.integers(1, 3)),
    st.tuples(st.just("apply"), st.integers(1, 2)),
    st.tuples(st.just("apply_both")),
    st.tuples(st.just("update"), st.booleans()),
)


@settings(max_examples=60)
@given(st.lists(ACTIONS, min_size=4, max_size=14))
@pytest.mark.filterwarnings("ignore::scaler.ScaleWarning")
def test_any_order_of_calls(actions):
    program = Program()
    for name, *arguments in actions:
        needs = program.taped if name == "differentiate" else program.kept
        if name in ("differentiate", "unscale", "apply", "apply_both") and not needs:
            continue
        with contextlib.suppress(scaler.InvalidArgument):
            getattr(program, name)(*arguments)


BETWEEN = {
    "grows": lambda program: program.update(True),
    "skips": lambda program: program.update(False),
    "another loss is unscaled": lambda program: (
        program.scale(1),
        program.differentiate(-1, False),
        program.unscale(1),
    ),
}


@pytest.mark.parametrize("early", [True, False], ids=["gradient before", "gradient after"])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.filterwarnings("ignore::scaler.ScaleWarning")
def test_gradients_of_two_scales_in_one_apply_are_refused(between, early):
    program = Program()
    program.scale(0)
    kept = []
    if early:
        program.differentiate(0, False)
        kept, program.kept = program.kept, []
    BETWEEN[between](program)
    if "unscaled" in between:
        program.update(True)
    program.scale(1)
    for _ in range(len(program.taped)):
        program.differentiate(0, False)
    program.kept = kept + program.kept
    with pytest.raises(scaler.InvalidArgument, match="several losses were scaled"):
        program.apply_both()
    assert [float(weight[0]) for weight in program.weights] == [0.0, 0.0]


@pytest.mark.parametrize("unscale", ["unscale", "get_unscaled_gradients"])
def test_kept_gradients_are_unscaled_by_the_scale_that_the_user_names(unscale):
    weight = tf.Variable([0.0])
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), scaler.Dynamic(INITIAL, growth_interval=1))
    ours, kept = optimizer.loss_scaler, []
    for factor in (1.0, 3.0):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(factor * weight))
        kept.append((tape.gradient(scaled, [weight])[0], ours.scale_of_gradients))
        ours.update(scaler.Event(tf.constant(True)))
    total = kept[0][0] + kept[1][0] * kept[0][1] / kept[1][1]
    method = getattr(ours, unscale) if unscale == "unscale" else optimizer.get_unscaled_gradients
    with pytest.raises(scaler.InvalidArgument, match="several losses were scaled"):
        method([total])
    (grad,) = method([total], loss_scale=kept[0][1])
    assert float(grad[0]) == 4.0


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.filterwarnings("ignore::scaler.ScaleWarning")
def test_a_gradient_computed_late_carries_the_scale_of_its_own_loss(between):
    program = Program()
    program.scale(0)
    BETWEEN[between](program)
    program.scale(1)
    program.differentiate(0, False)
    program.apply(1)
    assert float(program.weights[0][0]) == -1.0


@pytest.mark.filterwarnings("ignore::scaler.ScaleWarning")
def test_an_ended_loss_that_was_differentiated_last_is_not_taken_for_one_that_waits():
    program = Program()
    program.scale(0)
    program.update(False)
    program.scale(1)
    program.differentiate(1, False)
    program.differentiate(0, False)
    with pytest.raises(scaler.InvalidArgument, match="may carry a scale of 1024 or 512"):
        program.loss_scaler.unscale([program.kept[1][1]])


@pytest.mark.filterwarnings("ignore::scaler.ScaleWarning")
def test_a_gradient_that_was_applied_is_not_taken_for_one_of_a_loss_that_waits():
    program = Program()
    program.scale(0)
    program.differentiate(0, False)
    program.update(True)
    program.scale(1)
    program.differentiate(0, False)
    _, (_, again) = program.kept
    ours, named = program.loss_scaler, program.loss_scaler.scale_of_gradients
    ours.apply(plain_descent, [again], [program.weights[1]], loss_scale=named)
    with pytest.raises(scaler.InvalidArgument, match="may carry a scale of 1024 or 2048"):
        ours.unscale([again])


def test_a_persistent_tape_that_is_asked_again_after_the_scale_moved():
    loss_scaler, weight = scaler.LossScaler(scaler.Dynamic(INITIAL, growth_interval=1)), tf.Variable([1.0])
    with tf.GradientTape(persistent=True) as tape:
        first = loss_scaler.scale(tf.reduce_sum(weight))
        second = loss_scaler.scale(tf.reduce_sum(3.0 * weight))
    assert float(loss_scaler.unscale(tape.gradient(first, [weight]))[0][0]) == 1.0
    loss_scaler.update(scaler.Event(tf.constant(True)))
    assert float(loss_scaler.unscale(tape.gradient(second, [weight]))[0][0]) == 3.0


@pytest.mark.parametrize("vectorized", [True, False])
def test_a_jacobian_of_a_scaled_loss(vectorized):
    loss_scaler, weight = scaler.LossScaler(scaler.Dynamic(INITIAL, growth_interval=1)), tf.Variable([1.0, 2.0])
    for _ in range(2):
        with tf.GradientTape(persistent=True) as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight))
        found = tape.jacobian(scaled, weight, experimental_use_pfor=vectorized)
        assert loss_scaler.unscale([found])[0].numpy().tolist() == [1.0, 1.0]
        loss_scaler.update(scaler.Event(tf.constant(True)))


def test_losses_that_nobody_differentiates_do_not_stand_in_the_way():
    program = Program()
    for _, finite in itertools.product(range(17), (True, False)):
        program.scale(0)  # An evaluation, say.
        program.taped.clear()
        program.scale(1)
        program.differentiate(0, False)
        program.unscale(1)
        program.update(finite)


def test_a_step_that_an_error_broke_off_does_not_stand_in_the_way():
    program = Program()
    program.scale(0)  # No tape ever differentiates it.
    program.taped.clear()
    for _ in range(3):
        for which in (0, 1):
            program.scale(which)
            program.differentiate(0, False)
            program.apply(1)
    assert [float(weight[0]) for weight in program.weights] == [-3.0, -9.0]


def test_a_loss_that_is_differentiated_when_another_of_its_scale_was_applied():
    program = Program()
    program.scale(0)
    program.scale(1)
    program.differentiate(0, False)
    program.apply(1)
    program.differentiate(0, False)
    program.scale(0)
    program.differentiate(0, False)
    (_, early), _ = program.kept
    with pytest.raises(scaler.InvalidArgument, match="may carry a scale of 1024 or 2048"):
        program.loss_scaler.apply(plain_descent, [early * 1.0], [program.weights[1]])
    program.apply(1)
    assert [float(weight[0]) for weight in program.weights] == [-1.0, -3.0]
