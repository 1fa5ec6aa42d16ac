"""Guards that a loss is scaled once and a gradient unscaled once, whichever of our faces does it."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import gradients_of, modes, plain_descent
from step_programs import trace_no_branches
from ways import graph

import loops
import scaler

STATIC = scaler.Static(8.0)


def weight():
    return tf.Variable([0.5, -1.0])


def slope(variable):
    return tf.reduce_sum(variable * [2.0, 3.0])


@modes("eager", "graph", "xla")
def test_a_loss_scaled_twice_is_refused(execute):
    loss_scaler, variable = scaler.LossScaler(STATIC), weight()
    with pytest.raises(scaler.InvalidArgument, match="scaled already"):
        execute(lambda: loss_scaler.scale(loss_scaler.scale(slope(variable))))()


@pytest.mark.parametrize(
    ("jit", "between"),
    [
        *((False, between) for between in ("half", "sum", "function", "branch", "loop", "16 bits", "reduced")),
        *((True, "half"), (True, "branch")),
    ],
)
def test_whatever_comes_between(between, jit):
    loss_scaler, other, variable = scaler.LossScaler(STATIC), scaler.LossScaler(STATIC), weight()

    def looped(value):
        for _ in tf.range(2):
            value = value * 0.5
        return value

    changed = {
        "half": lambda loss: loss / 2.0,
        "sum": lambda loss: loss + tf.reduce_sum(variable**2),
        "function": tf.function(lambda loss: loss * 2.0),
        "branch": lambda loss: tf.cond(variable[0] > 0.0, lambda: loss * 2.0, lambda: 1.0),
        "loop": tf.function(looped),
        "16 bits": lambda loss: tf.cast(loss, tf.bfloat16),
        "reduced": lambda loss: tf.reduce_mean(tf.stack([loss, 1.0])),
    }[between]

    @tf.function(jit_compile=jit)
    def step():
        return gradients_of(other, lambda: changed(loss_scaler.scale(slope(variable))), variable)

    with pytest.raises(scaler.InvalidArgument, match="scaled already"):
        step()


def test_scaled_inside_of_a_function_or_a_branch():
    loss_scaler, variable = scaler.LossScaler(STATIC), weight()
    inner = graph(lambda: (slope(variable), loss_scaler.scale(slope(variable))))
    with pytest.raises(scaler.InvalidArgument, match="scaled already"):
        graph(lambda: loss_scaler.scale(inner()[1]))()

    @graph
    def in_a_branch():
        loss = inner()[1]
        return tf.cond(loss > 0.0, lambda: loss_scaler.scale(loss), lambda: 0.0)

    with pytest.raises(scaler.InvalidArgument, match="scaled already"):
        in_a_branch()
    # The other output of that function is not scaled.
    assert graph(lambda: loss_scaler.scale(inner()[0]))().numpy() == 8.0 * slope(variable).numpy()


def test_between_all_of_our_faces():
    variable = weight()
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(1.0), STATIC)
    losses, alone = scaler.PerLoss({"a": STATIC, "b": STATIC}), scaler.LossScaler(STATIC)
    scale = {
        "optimizer": optimizer.scale_loss,
        "several": lambda loss: tf.reduce_sum(optimizer.scale_loss(tf.stack([loss, loss]))),
        "losses": lambda loss: losses.scale({"a": loss, "b": slope(variable)})["a"],
        "alone": alone.scale,
    }

    @graph
    def step():
        for first, second in itertools.product(scale.values(), repeat=2):
            with pytest.raises(scaler.InvalidArgument, match="scaled already"):
                second(first(slope(variable)))

    step()


def test_a_loss_function_that_scales_in_a_train_step_or_under_fit():
    loss_scaler = scaler.LossScaler(STATIC)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])

    def loss(y, prediction):
        return loss_scaler.scale(tf.reduce_mean((y - prediction) ** 2))

    step = loops.TrainStep(model, loss, keras.optimizers.SGD(0.1), loss_scaler=loss_scaler)
    with pytest.raises(scaler.InvalidArgument, match="scaled already"):
        graph(step)((tf.ones([4, 2]), tf.ones([4, 1])))
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1), STATIC), loss=loss)
    with pytest.raises(scaler.InvalidArgument, match="scaled already"):
        model.fit(np.ones([4, 2], np.float32), np.ones([4, 1], np.float32), verbose=0)


@modes("eager", "graph")
def test_gradients_unscaled_twice_are_refused(execute, monkeypatch):
    trace_no_branches(monkeypatch)
    loss_scaler, variable = scaler.LossScaler(STATIC), weight()

    def grads():
        return loss_scaler.unscale([gradients_of(loss_scaler, lambda: slope(variable), variable)])

    with pytest.raises(scaler.InvalidArgument, match="unscaled=True"):
        execute(lambda: loss_scaler.unscale(grads()))()
    with pytest.raises(scaler.InvalidArgument, match="unscaled=True"):
        execute(lambda: loss_scaler.apply(plain_descent, grads(), [variable]).finite)()
    assert execute(lambda: loss_scaler.apply(plain_descent, grads(), [variable], unscaled=True).finite)()


@pytest.mark.parametrize("between", ["clip", "slices"])
def test_gradients_changed_between_the_two(between):
    loss_scaler, variable = scaler.LossScaler(STATIC), weight()

    @graph
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variable, [0, 0])) if between == "slices" else slope(variable)
            scaled = loss_scaler.scale(loss)
        grads = loss_scaler.unscale([tape.gradient(scaled, variable)])
        if between == "clip":
            grads, _ = tf.clip_by_global_norm(grads, 1.0)
        return loss_scaler.apply(plain_descent, grads, [variable]).finite

    with pytest.raises(scaler.InvalidArgument, match="unscaled=True"):
        step()


@pytest.mark.slow_with("graph")
@modes("eager", "graph")
def test_sums_of_losses_penalties_and_inner_steps_are_no_mistake(execute, monkeypatch):
    """Several scaled losses, a penalty on unscaled gradients, an inner step whose weights the outer loss depends on."""
    trace_no_branches(monkeypatch)
    loss_scaler, variable = scaler.LossScaler(STATIC), weight()

    def step():
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner_scaled = loss_scaler.scale(tf.reduce_sum(variable**3))
            (grad,) = loss_scaler.unscale([inner.gradient(inner_scaled, variable)])
            faster = variable - 0.1 * grad
            first, second = loss_scaler.scale(slope(faster)), loss_scaler.scale(tf.reduce_sum(grad**2))
            total = first + second
        grads = loss_scaler.unscale([tape.gradient(total, variable)])
        outcome = loss_scaler.apply(plain_descent, grads, [variable], unscaled=True)
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(
                slope(variable) + tf.stop_gradient(first) + 0.0 * tf.reduce_sum(tf.ones_like(total))
            )
        again = loss_scaler.apply(plain_descent, [tape.gradient(scaled, variable)], [variable])
        return outcome.finite, again.finite

    assert all(execute(step)())


@pytest.mark.parametrize(
    ("inner", "how", "method"),
    [
        *((True, "by hand", "unscale"), (True, "before the tape", "apply")),
        *((False, "scale", "unscale"), (False, "by hand", "apply"), (False, "before the tape", "unscale")),
    ],
)
def test_gradients_that_another_scaler_scaled(method, how, inner, monkeypatch):
    trace_no_branches(monkeypatch)
    first, second, variable = scaler.LossScaler(scaler.Dynamic(8.0)), scaler.LossScaler(scaler.Dynamic(2.0)), weight()

    def grads(loss_scaler):
        read = loss_scaler.loss_scale
        with tf.GradientTape() as tape:
            loss = slope(variable)
            scales = {"scale": loss_scaler.scale, "by hand": lambda loss: loss * loss_scaler.loss_scale}
            scaled = scales.get(how, lambda loss: loss * read)(loss)
        return [tape.gradient(scaled, variable)]

    def step(loss_scaler):
        found = graph(lambda: grads(loss_scaler))() if inner else grads(loss_scaler)
        if method == "unscale":
            return second.unscale(found)
        return second.apply(plain_descent, found, [variable]).finite

    graph(lambda: step(second))()
    before = variable.numpy()
    with pytest.raises(scaler.InvalidArgument, match=rf"{method}\(grads\).*another loss scaler"):
        graph(lambda: step(first))()
    np.testing.assert_array_equal(variable.numpy(), before)


def test_an_inner_step_by_another_scaler_is_no_mistake(monkeypatch):
    trace_no_branches(monkeypatch)
    inner, outer, variable = scaler.LossScaler(STATIC), scaler.LossScaler(scaler.Dynamic(2.0)), weight()
    plain = scaler.LossScaler(scaler.NoScaling())

    @graph
    def step():
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner_tape:
                scaled = inner.scale(tf.reduce_sum(variable**3))
            (grad,) = inner.unscale([inner_tape.gradient(scaled, variable)])
            total = outer.scale(slope(variable - 0.1 * grad))
        grads = [tape.gradient(total, variable)]
        divided = [grads[0] / outer.scale_of_gradients]
        outcomes = outer.apply(plain_descent, grads, [variable]), plain.apply(plain_descent, divided, [variable])
        return [outcome.finite for outcome in outcomes]

    assert all(step())


@pytest.mark.parametrize("between", ["add", "window"])
def test_changed_between_the_two_in_an_eager_step(between):
    loss_scaler, variable = scaler.LossScaler(STATIC), weight()
    total = tf.Variable([0.0, 0.0])

    def grads():
        return [gradients_of(loss_scaler, lambda: slope(variable), variable)]

    def changed(grads):
        total.assign_add(grads[0])
        return [tf.identity(total)] if between == "window" else [grads[0] + 0.01 * variable]

    assert loss_scaler.apply(plain_descent, changed(loss_scaler.unscale(grads())), [variable], unscaled=True).finite
    with pytest.warns(scaler.ScaleWarning, match="unscaled=True"):
        loss_scaler.apply(plain_descent, changed(loss_scaler.unscale(grads())), [variable])


def test_a_look_at_unscaled_gradients_is_no_mistake():
    loss_scaler, variables = scaler.LossScaler(STATIC), [weight(), weight()]

    def grads(by_hand=False):
        with tf.GradientTape() as tape:
            loss = slope(variables[0] * variables[1])
            scaled = loss * loss_scaler.loss_scale if by_hand else loss_scaler.scale(loss)
        return tape.gradient(scaled, variables)

    for _ in range(2):
        found = grads()
        assert tf.linalg.global_norm(loss_scaler.unscale(found)) > 0.0
        assert loss_scaler.apply(plain_descent, found, variables).finite
        found = grads()
        assert scaler.all_finite(loss_scaler.unscale(found))
        for grad, variable in zip(found, variables, strict=True):
            assert loss_scaler.apply(plain_descent, [grad], [variable], update=False).finite
        loss_scaler.update(scaler.Event(scaler.all_finite(loss_scaler.unscale(grads()))))
        assert loss_scaler.apply(plain_descent, grads(by_hand=True), variables).finite


@pytest.mark.parametrize("when", ["in the tape", "before it"])
def test_a_loss_multiplied_by_the_scale_is_not_scaled_again(when):
    loss_scaler, variable = scaler.LossScaler(STATIC), weight()

    @graph
    def step():
        read = loss_scaler.loss_scale
        with tf.GradientTape() as tape:
            by = loss_scaler.loss_scale if when == "in the tape" else read
            scaled = loss_scaler.scale(tf.reduce_mean([slope(variable) * by]))
        return tape.gradient(scaled, variable)

    with pytest.raises(scaler.InvalidArgument, match="scaled already"):
        step()


def test_a_penalty_unscaled_by_hand_is_part_of_the_loss():
    loss_scaler, variable, x = scaler.LossScaler(STATIC), weight(), tf.constant([2.0, 3.0])

    @graph
    def step():
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                inner_scaled = tf.reduce_sum(variable * x) * loss_scaler.loss_scale
            slopes = inner.gradient(inner_scaled, x) * (1.0 / loss_scaler.loss_scale)
            scaled = loss_scaler.scale(slope(variable) + tf.reduce_sum(tf.square(slopes)))
        return loss_scaler.unscale([tape.gradient(scaled, variable)])[0]

    np.testing.assert_allclose(step(), [2.0 + 2 * 0.5, 3.0 - 2 * 1.0])


def test_gradients_divided_by_the_scale_are_not_unscaled_again():
    loss_scaler, variable = scaler.LossScaler(STATIC), weight()

    @graph
    def step(unscaled):
        grads = [gradients_of(loss_scaler, lambda: slope(variable), variable) / loss_scaler.loss_scale]
        return loss_scaler.apply(plain_descent, grads, [variable], unscaled=unscaled).grad_norm

    with pytest.raises(scaler.InvalidArgument, match=r"were divided by loss_scale.*unscaled=True"):
        step(False)
    np.testing.assert_allclose(step(True), np.sqrt(13.0))
