"""Guards that a loss multiplied by the public `loss_scale` is unscaled by it, or that the doubt is noticed."""

import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import descent, gradients_of, modes, modes_with
from ways import graph

import scaler


class Descent:
    """A weight whose true gradient is 1, and steps that scale its loss in either way."""

    def __init__(self, strategy=None):
        self.weight = tf.Variable([0.0])
        # What a step selects is traced in half the time of what it branches to.
        self.loss_scaler = scaler.LossScaler(strategy or scaler.Dynamic(16.0, growth_interval=1), select=True)
        self.optimizer = descent(self.weight)

    def scaled(self):
        with tf.GradientTape() as tape:
            loss = self.loss_scaler.scale(self.weight[0])
        return self._apply(tape, loss)

    def by_hand(self, factor=1.0):
        with tf.GradientTape() as tape:
            loss = self.weight[0] * factor * self.loss_scaler.loss_scale
        return self._apply(tape, loss)

    def by_hand_of_state(self):
        with tf.GradientTape() as tape:
            loss = self.weight[0] * self.loss_scaler.state.loss_scale
        return self._apply(tape, loss)

    def by_hand_before_the_tape(self):
        loss_scale = self.loss_scaler.loss_scale
        with tf.GradientTape() as tape:
            loss = self.weight[0] * loss_scale
        return self._apply(tape, loss)

    def in_long_form(self):
        with tf.GradientTape() as tape:
            loss = self.weight[0] * self.loss_scaler.loss_scale
        (grad,) = self.loss_scaler.unscale([tape.gradient(loss, self.weight)])
        self.loss_scaler.update(scaler.Event(scaler.all_finite([grad])))
        self.weight.assign_sub(grad)
        return grad

    def _apply(self, tape, loss):
        return self.loss_scaler.apply(self.optimizer, [tape.gradient(loss, self.weight)], [self.weight]).loss_scale


@pytest.mark.slow_with("xla-by_hand_before_the_tape-1")
@modes_with(
    ("kind", "steps"),
    eager=[("by_hand", 1), ("by_hand", 2), ("in_long_form", 1), ("in_long_form", 2), ("by_hand_before_the_tape", 1)],
    graph=[("by_hand_before_the_tape", 1), ("by_hand_of_state", 2)],
    loop=[("in_long_form", 1)],
    xla=[("by_hand_before_the_tape", 1)],
)
def test_by_hand_alone_and_after_a_step_with_scale(execute, kind, steps):
    run = Descent()
    taken = [
        execute(tf.autograph.experimental.do_not_convert(getattr(run, step))) for step in ("scaled", kind)[-steps:]
    ]
    for number in range(1, 4):
        for step in taken:
            step()
        assert run.weight.numpy()[0] == -steps * number
    assert run.loss_scaler.loss_scale.numpy() == 16.0 * 2 ** (3 * steps)


def test_a_read_that_is_not_seen_is_refused_once_the_scale_moved():
    run = Descent()
    run.scaled()

    @graph
    def step(loss_scale):
        with tf.GradientTape() as tape:
            loss = run.weight[0] * loss_scale
        return run._apply(tape, loss)

    with pytest.raises(tf.errors.InvalidArgumentError, match="loss_scale was read outside of a tape"):
        step(run.loss_scaler.loss_scale)
    assert run.weight.numpy()[0] == -1.0


def test_gradients_that_come_as_arguments_of_two_decisions():
    """Nobody read the scale: it is that of the loss."""
    run = Descent()
    decide = graph(lambda grad: run.loss_scaler.apply(run.optimizer, [grad], [run.weight]).loss_scale)
    for number in range(1, 3):
        grad = gradients_of(run.loss_scaler, lambda: run.weight[0], run.weight)
        scales = [float(decide(grad)) for _ in range(2)]
        assert scales[0] == scales[1]
        assert run.weight.numpy()[0] == -2.0 * number
        assert run.loss_scaler.loss_scale > scales[0]


def test_unscaled_gradients_of_a_window_are_in_no_doubt():
    run, total = Descent(), tf.Variable([0.0])
    run.scaled()
    run.weight.assign([0.0])

    @graph
    def step():
        log = run.loss_scaler.loss_scale
        run.loss_scaler.apply(run.optimizer, [total.read_value()], [run.weight], unscaled=True)
        return log

    total.assign([1.0])
    assert step().numpy() == 32.0
    assert run.weight.numpy()[0] == -1.0


@pytest.mark.slow
def test_several_losses_read_outside_of_the_tape():
    weight, losses = tf.Variable([0.0]), scaler.PerLoss({"a": scaler.Dynamic(16.0, growth_interval=1)})
    optimizer = descent(weight)

    @tf.function
    def step(by_hand):
        loss_scale = losses["a"].loss_scale
        with tf.GradientTape() as tape:
            scaled = weight[0] * loss_scale if by_hand else losses.scale({"a": weight[0]})["a"]
        return losses.apply(optimizer, {"a": [tape.gradient(scaled, weight)]}, [weight]).finite

    for number, by_hand in enumerate((False, True, True, False), 1):
        assert step(by_hand)
        assert weight.numpy()[0] == -number


@pytest.mark.filterwarnings("ignore:apply.grads.. another apply of this function")
def test_one_read_for_two_decisions():
    run = Descent()
    run.scaled()

    @graph
    def step():
        loss_scale = run.loss_scaler.loss_scale
        with tf.GradientTape(persistent=True) as tape:
            loss = run.weight[0] * loss_scale
        return run._apply(tape, loss), run._apply(tape, loss)

    assert [float(scale) for scale in step()] == [32.0, 32.0]
    assert run.weight.numpy()[0] == -3.0


def test_in_a_function_around_which_a_loop_runs():
    run = Descent()
    loss = graph(lambda: run.weight[0] * run.loss_scaler.loss_scale)

    def by_hand(index):
        """Its loss is in a function of its own."""
        with tf.GradientTape() as tape:
            scaled = loss()
        run._apply(tape, scaled)
        return [index + 1]

    @graph
    def train():
        run.scaled()
        tf.while_loop(lambda index: index < 3, by_hand, [0])

    train()
    assert run.weight.numpy()[0] == -4.0


def test_an_earlier_bad_loss_is_not_blamed_for_it():
    run = Descent()
    with tf.GradientTape() as tape:
        loss = run.loss_scaler.scale(run.weight[0] * np.float32(np.inf))
    run._apply(tape, loss)
    assert run.loss_scaler.last_skip.cause == scaler.Cause.LOSS
    run.by_hand(np.float32(np.inf))
    assert run.loss_scaler.last_skip.cause == scaler.Cause.OVERFLOW


def test_a_read_for_a_log_changes_nothing():
    """One `scale`, two decisions, and the scale read after the first has moved it."""
    run = Descent()
    with tf.GradientTape(persistent=True) as tape:
        loss = run.loss_scaler.scale(run.weight[0])
        scales = [run.loss_scaler.loss_scale]
    scales += [run._apply(tape, loss) for _ in range(2)]
    assert list(map(float, scales)) == [16.0] * 3
    assert run.weight.numpy()[0] == -2.0


@modes("eager", "graph")
def test_a_bound_that_moves_while_the_step_is_open(execute):
    """Two parts of one step: the second is scaled as the first was, and as it will be unscaled."""
    highest = tf.Variable(2.0**15)
    run = Descent(scaler.Dynamic(2.0**15, max_scale=highest, min_scale=1.0))

    def part():
        with tf.GradientTape() as tape:
            loss = run.weight[0] * run.loss_scaler.loss_scale
        grad = tape.gradient(loss, run.weight) / run.loss_scaler.scale_of_gradients
        highest.assign(2.0**10)
        return grad

    part = execute(part)
    assert [part().numpy()[0] for _ in range(2)] == [1.0, 1.0]
    run.loss_scaler.update(scaler.Event(tf.constant(True)))
    assert part().numpy()[0] == 1.0
    assert run.loss_scaler.scale_of_gradients.numpy() == 2.0**10


def test_a_log_before_the_update_and_the_gradients_after_it():
    run = Descent()
    for number in range(1, 4):
        grads = [gradients_of(run.loss_scaler, lambda: run.weight[0], run.weight)]
        assert float(run.loss_scaler.loss_scale) == 16.0 * 2 ** (number - 1)
        run.loss_scaler.update(scaler.Event(tf.constant(True)))
        assert run.loss_scaler.unscale(grads)[0].numpy() == [1.0]
        assert run.loss_scaler.apply(run.optimizer, grads, [run.weight], update=False).finite
        assert run.weight.numpy()[0] == -number


def test_read_outside_of_the_tape_after_the_scale_moved():
    run = Descent()
    run.scaled()
    with tf.GradientTape() as tape:
        loss = run.weight[0] * 1.0
    grads = [tape.gradient(loss, run.weight) * run.loss_scaler.loss_scale]
    for call in (
        lambda: run.loss_scaler.apply(run.optimizer, grads, [run.weight]),
        lambda: run.loss_scaler.unscale(grads),
    ):
        with pytest.raises(scaler.InvalidArgument, match=r"may carry its scale of 16 or the present one of 32"):
            call()
    assert run.weight.numpy()[0] == -1.0
    # With one scale there is nothing to confuse.
    constant = Descent(scaler.Static(4.0))
    constant.scaled()
    grads = [tf.constant([1.0]) * constant.loss_scaler.loss_scale]
    assert constant.loss_scaler.apply(constant.optimizer, grads, [constant.weight]).finite
    assert constant.weight.numpy()[0] == -2.0


@modes_with(
    ("in_a_loop", "moves"),
    graph=[(False, False), (False, True), (True, True)],
    xla=[(True, False), (True, True)],
)
def test_several_reads_count_only_if_the_scale_did_not_move(execute, in_a_loop, moves):
    """In a loop XLA would drop what looks at the scale in the running graph."""
    run = Descent(scaler.Dynamic(2.0**10, growth_interval=1))
    loss_scaler, weight = run.loss_scaler, run.weight

    def gradient():
        factor = loss_scaler.loss_scale
        with tf.GradientTape() as tape:
            scaled = -tf.reduce_sum(weight) * 0.5 * factor
        return tape.gradient(scaled, weight)

    def add(index, total):
        return index + 1, total + gradient()

    @tf.autograph.experimental.do_not_convert
    def step():
        if in_a_loop:
            _, total = tf.while_loop(lambda index, _: index < 2, add, (0, tf.zeros([1])))
        else:
            total = gradient()
        if moves:
            loss_scaler.update(scaler.Event(tf.constant(True)))
        total += tf.zeros([1]) if in_a_loop else gradient()
        return loss_scaler.apply(run.optimizer, [total], [weight]).loss_scale

    take = execute(step)
    if moves:
        with pytest.raises(scaler.InvalidArgument, match=r"the loss scale moved (since|between)"):
            take()
    else:
        assert [float(take()) for _ in range(3)] == [2.0**10, 2.0**11, 2.0**12]
    assert float(weight[0]) == (0.0 if moves else 3.0)


def test_xla_skips_a_step_of_which_the_scale_is_in_doubt():
    run = Descent(scaler.Dynamic(2.0**10, growth_interval=1))
    loss_scaler, weight = run.loss_scaler, run.weight

    @graph(jit_compile=True)
    def step(grad):
        logged = loss_scaler.loss_scale
        return loss_scaler.apply(run.optimizer, [grad * 1.0], [weight]).finite, logged

    loss_scaler.scale(tf.constant(1.0))
    loss_scaler.update(scaler.Event(tf.constant(True)))
    assert not step(tf.constant([-1.0]))[0]
    assert weight.numpy().tolist() == [0.0]
