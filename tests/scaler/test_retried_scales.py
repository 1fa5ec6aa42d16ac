"""Guards that gradients which `LossScaler.retry` returned are divided by the scale of the retry, or refused."""

import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import descent, modes_with
from ways import graph

import scaler
from scaler import Event, InvalidArgument

SLOPES = 64.0, 3.0
"""The first overflows at 2^15 and comes back at 2^9; the second does not overflow at 2^14."""
MOVED = [[-63.0], [-2.0]]


def half(weight, slope):
    return tf.reduce_sum(tf.cast(tf.cast(weight, tf.float16) * tf.constant(slope, tf.float16), tf.float32))


class Step:
    """Two weights, whose gradients are retried and then given to `use`."""

    def __init__(self, use, read=False, strategy=None):
        self.weights = [tf.Variable([1.0]), tf.Variable([1.0])]
        # What a step selects is traced in half the time of what it branches to.
        self.loss_scaler = scaler.LossScaler(strategy or scaler.Dynamic(2.0**15), select=True)
        self.optimizer = descent(*self.weights)
        self.kept = [tf.Variable([0.0]), tf.Variable([0.0])]
        self._use, self._read = use, read

    @tf.autograph.experimental.do_not_convert
    def take(self):
        by_hand = self.loss_scaler.loss_scale if self._read else None
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.add_n(list(map(half, self.weights, SLOPES)))
            scaled = loss * by_hand if self._read else self.loss_scaler.scale(loss)
        grads = tape.gradient(scaled, self.weights)

        def again(small):
            return tape.gradient(scaled, self.weights, output_gradients=small)

        found, loss_scale, retries = self.loss_scaler.retry(grads, again)
        self._use(self, found, loss_scale, grads)
        return loss_scale, retries

    def apply(self, grads, **arguments):
        return self.loss_scaler.apply(self.optimizer, grads, self.weights, **arguments)

    def moved(self):
        return [weight.numpy().tolist() for weight in self.weights]


def long_form(step, grads, loss_scale, before):
    unscaled = step.loss_scaler.unscale(grads)
    step.optimizer.apply(unscaled, step.weights)
    step.loss_scaler.update(Event(scaler.all_finite(unscaled)))


def from_variables(step, grads, loss_scale, before):
    for variable, grad in zip(step.kept, grads, strict=True):
        variable.assign(grad)
    step.apply([tf.identity(variable) for variable in step.kept])


USES = {
    "apply": lambda step, grads, loss_scale, before: step.apply(grads),
    "changed": lambda step, grads, loss_scale, before: step.apply([tf.stop_gradient(grad) * 1.0 for grad in grads]),
    "long form": long_form,
    "scale_of_gradients": lambda step, grads, loss_scale, before: step.apply(
        grads, loss_scale=step.loss_scaler.scale_of_gradients
    ),
    "loss_scale": lambda step, grads, loss_scale, before: step.apply(grads, loss_scale=loss_scale),
    "from variables": from_variables,
}


@pytest.mark.slow_with("xla-apply")
@modes_with(
    ("use",),
    eager=[(use,) for use in USES if use != "from variables"],
    graph=[("changed",), ("from variables",)],
    xla=[("apply",)],
)
def test_retried_gradients_are_divided_by_the_scale_of_the_retry(execute, use, request):
    eager = "eager" in request.node.name
    # A scale that was read outside of the tape is that of the retry from then on.
    step = Step(USES[use], read=use == "changed" and not eager)
    take = execute(step.take)
    if eager and use == "changed":  # Where only the order of the calls is known.
        with pytest.raises(InvalidArgument, match="may carry a scale of 32768 or 512"):
            take()
        assert step.moved() == [[1.0], [1.0]]
        return
    assert list(map(float, take())) == [2.0**9, 6.0]
    assert step.moved() == MOVED
    assert float(step.loss_scaler.loss_scale) == 2.0**9
    take()  # Now nothing is retried, and its gradients carry the scale that they have.
    np.testing.assert_array_equal(step.moved(), [[-127.0], [-5.0]])


MIXED = {
    "a part": lambda step, grads, loss_scale, before: step.apply([grads[0], before[1]]),
    "a sum": lambda step, grads, loss_scale, before: step.apply([grads[0] + before[0], grads[1]]),
    "two": lambda step, grads, loss_scale, before: step.apply(
        [grads[0], step.loss_scaler.retry(before, lambda small: [one * small for one in before])[0][1]]
    ),
}


@pytest.mark.parametrize("use", MIXED)
def test_gradients_of_a_retry_beside_others_are_refused(use):
    step = Step(MIXED[use])
    with pytest.raises(InvalidArgument, match=r"come from a retry.*expected all gradients of one retry"):
        graph(step.take)()


def test_a_penalty_on_retried_gradients_is_refused():
    weight, point, loss_scaler = tf.Variable([1.0]), tf.Variable([1.0]), scaler.LossScaler(scaler.Dynamic(2.0**8))

    @graph
    def step():
        with tf.GradientTape() as tape:
            with tf.GradientTape(persistent=True) as inner:
                scaled = loss_scaler.scale(half(weight * point, 3.0))

            def again(small):
                return [inner.gradient(scaled, point, output_gradients=small)]

            (grad,) = loss_scaler.unscale(loss_scaler.retry(again(None), again)[0])
            outer = loss_scaler.scale(tf.reduce_sum(tf.square(grad)))
        loss_scaler.unscale([tape.gradient(outer, weight)])

    with pytest.raises(InvalidArgument, match="leave out that retry and unscale the gradients as they are"):
        step()


def test_the_part_of_an_eager_step_that_was_not_retried_is_refused():
    step = Step(MIXED["a part"])
    with pytest.raises(InvalidArgument, match="may carry a scale of 32768 or 512"):
        step.take()
    assert step.moved() == [[1.0], [1.0]]


def test_gradients_that_a_function_has_retried_need_their_scale():
    kept = []
    inside = Step(lambda step, grads, loss_scale, before: kept.append((grads, loss_scale)))
    start = [(variable, variable.numpy()) for variable in (*inside.weights, *inside.loss_scaler.variables)]

    @graph
    def retried():
        kept.clear()
        inside.take()
        return kept[0]

    def without():
        inside.apply(retried()[0])

    def with_it():
        grads, loss_scale = retried()
        inside.apply(grads, loss_scale=loss_scale)

    for wrap in (lambda function: function, graph):
        for variable, value in start:
            variable.assign(value)
        with pytest.raises(InvalidArgument, match=r"inside of a function.*apply\(\.\.\., loss_scale=loss_scale\)"):
            wrap(without)()
        assert inside.moved() == [[1.0], [1.0]]
        wrap(with_it)()
        assert inside.moved() == MOVED


def test_each_loss_of_several_may_be_retried():
    weight, grads = tf.Variable([1.0]), {}
    losses = scaler.PerLoss({"task": scaler.Dynamic(2.0**15), "penalty": scaler.Dynamic(2.0**10)})
    with tf.GradientTape(persistent=True) as tape:
        scaled = losses.scale({"task": half(weight, 64.0), "penalty": half(weight, 2.0)})
    for name, loss in scaled.items():

        def again(small, loss=loss):
            return tape.gradient(loss, [weight], output_gradients=small)

        grads[name], _, _ = losses[name].retry(again(1.0), again)
    assert losses.apply(descent(weight), grads, [weight]).finite
    assert weight.numpy().tolist() == [1.0 - 64.0 - 2.0]


@pytest.mark.parametrize("wrap", [graph, lambda function: function], ids=["graph", "eager"])
def test_a_scale_that_cannot_move_needs_no_mark(wrap):
    step = Step(USES["apply"], strategy=scaler.Static(2.0**9))
    wrap(step.take)()
    assert step.moved() == MOVED
