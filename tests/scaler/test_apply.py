"""Guards applied and skipped steps for every kind of optimizer: what it does without the gate, or not one bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw
from scaler_cases import OPTIMIZERS, by_hand, modes, modes_with, plain_descent, slots

import scaler

GOOD = [(np.float32([[1, -2], [0.5, 4]]), np.float32([3])), (np.float32([[-4, 1], [8, 0.25]]), np.float32([-1]))]


def variables(kind="float32"):
    return [
        tf.Variable(tf.constant([[1.0, 2.0], [3.0, -4.0]], kind), name="kernel"),
        tf.Variable(tf.constant([0.5], kind), name="bias"),
    ]


@pytest.mark.slow_with("loop-SGD-float16")
@modes_with(
    ("name", "kind"),
    eager=[("SGD", "float32"), ("Lion", "float32")],
    graph=[("plain", "float16"), ("AdamW", "float16")],
    loop=[("SGD", "float16")],
)
def test_applied_steps_are_the_optimizers_and_skipped_ones_change_no_bit(execute, name, kind):
    ours, theirs = variables(kind), variables()
    masters = scaler.MasterWeights(ours)
    gated, alone = OPTIMIZERS[name](), OPTIMIZERS[name]()
    loss_scaler = by_hand(scaler.Static(64.0))
    step = execute(lambda *grads: loss_scaler.apply(gated, list(grads), masters).finite)

    def ungated(*grads):
        getattr(alone, "apply", alone)([tf.constant(grad) for grad in grads], theirs)

    if isinstance(alone, keras.optimizers.Optimizer):
        alone.build(theirs)

    def scaled(grads):
        return [tf.cast(grad * 64, kind) for grad in grads]

    for number, grads in enumerate(GOOD):
        assert step(*scaled(grads))
        before = raw(ours, masters.weights, slots(gated))
        for bad in (np.inf, -np.inf, np.nan):
            spoiled = [np.array(grad) for grad in scaled(grads)]
            spoiled[1][0] = bad
            assert not step(*spoiled)
        assert raw(ours, masters.weights, slots(gated)) == before
        if isinstance(gated, keras.optimizers.Optimizer):
            assert gated.iterations.numpy() == number + 1
        ungated(*grads)
    for our, their, model in zip(masters.weights, theirs, ours, strict=True):
        # Compilers may contract a * b + c differently with and without the gate around it.
        np.testing.assert_allclose(our.numpy(), their.numpy(), rtol=1e-6)
        np.testing.assert_array_equal(model.numpy(), our.numpy().astype(kind))
    assert [int(count) for count in loss_scaler.counters] == [8, 2, 6, 3]


@modes("eager")
def test_a_variable_without_a_gradient_at_first_may_have_one_later(execute):
    ours, optimizer = variables(), keras.optimizers.Adam(0.5)
    loss_scaler = by_hand(scaler.Static(2.0))
    first = execute(lambda grad: loss_scaler.apply(optimizer, [grad, None], ours).finite)
    both = execute(lambda *grads: loss_scaler.apply(optimizer, list(grads), ours).finite)
    with pytest.warns(scaler.ScaleWarning, match="no gradient for"):
        assert first(GOOD[0][0])
    assert ours[1].numpy()[0] == 0.5
    assert both(*GOOD[0])
    assert ours[1].numpy()[0] < 0.5
    assert optimizer.iterations.numpy() == 2


@pytest.mark.slow_with("xla-overflowing square")
@modes_with(
    ("where",),
    eager=[("overflowing square",)],
    graph=[("overflow of the unscaled value",)],
    xla=[("overflowing square",)],
)
def test_finite_gradients_that_an_optimizer_would_turn_into_nan_are_skipped(execute, where):
    w = tf.Variable([1.0])
    optimizer = keras.optimizers.Adam()
    square = where == "overflowing square"
    loss_scaler = by_hand(scaler.Static(1.0 if square else 2.0**-20))
    step = execute(lambda grad: loss_scaler.apply(optimizer, [grad], [w]).finite)
    assert not step(np.float32([1e20 if square else 1e37]))
    assert w.numpy()[0] == 1.0
    assert optimizer.iterations.numpy() == 0


@pytest.mark.slow_with("loop-plain")
@modes_with(("name",), eager=[("Adam",)], graph=[("SGD",)], loop=[("plain",)])
def test_embedding_gradients_with_duplicate_indices(execute, name):
    tables = [tf.Variable(np.arange(8, dtype=np.float32).reshape(4, 2)) for _ in range(2)]
    gated, alone = OPTIMIZERS[name](), OPTIMIZERS[name]()
    loss_scaler = by_hand(scaler.Static(16.0))

    def step(ids, weight):
        with tf.GradientTape() as tape:
            loss = loss_scaler.scale(tf.reduce_sum(tf.gather(tables[0], ids)) * weight)
        grads = tape.gradient(loss, [tables[0]])
        assert isinstance(grads[0], tf.IndexedSlices)
        return loss_scaler.apply(gated, grads, [tables[0]]).finite

    run, ids = execute(step), np.int32([3, 1, 3, 3])
    assert run(ids, np.float32(0.5))
    dense = tf.constant([[0.0, 0], [0.5, 0.5], [0, 0], [1.5, 1.5]])
    (getattr(alone, "apply", alone))([dense], [tables[1]])
    np.testing.assert_allclose(tables[0].numpy(), tables[1].numpy(), rtol=2e-7)
    before = raw(tables[:1], slots(gated))
    # Each row alone is finite, the sum of the duplicates is not.
    assert not run(ids, np.float32(2.4e38 / 16))
    # The squares of all rows fit float32, those of the sums do not.
    assert not run(ids, np.float32(5e18))
    assert not run(ids, np.float32(np.inf))
    assert raw(tables[:1], slots(gated)) == before


def test_a_function_is_called_with_the_gradients_that_are_there_in_float32():
    seen = []
    by_hand(scaler.Static(2.0)).apply(
        lambda grads, targets: seen.append((grads, targets)),
        [None, tf.constant([4.0], tf.float16)],
        scaler.MasterWeights(variables()[:1] + [tf.Variable(tf.zeros([1], tf.float16), name="last")]),
    )
    ((grads, targets),) = seen
    assert [grad.dtype for grad in grads] == [tf.float32]
    assert grads[0].numpy()[0] == 2.0
    assert [target.name for target in targets] == ["last:0"]


@modes("eager", "graph")
def test_variables_of_16_bits_may_be_updated_when_asked_for(execute):
    w = tf.Variable(tf.ones([2], tf.float16))
    loss_scaler = by_hand(scaler.Static(2.0))

    def descent(grads, targets):
        plain_descent([tf.cast(grad, tf.float16) for grad in grads], targets)

    step = execute(lambda grad: loss_scaler.apply(descent, [grad], [w], allow_16bit_updates=True).finite)
    assert step(np.float16([1, -1]))
    assert not step(np.float16([1, np.inf]))
    np.testing.assert_array_equal(w.numpy(), np.float16([0.5, 1.5]))


def test_a_generator_of_gradients_and_a_tuple_of_variables_will_do():
    w = tf.Variable([1.0])
    loss_scaler = by_hand(scaler.Static(2.0))
    assert loss_scaler.apply(plain_descent, (grad for grad in [tf.constant([1.0])]), (w,)).finite
    assert w.numpy()[0] == 0.5


def test_a_norm_that_overflows_only_over_all_variables_is_skipped():
    ours = [tf.Variable([1.0]), tf.Variable([1.0])]
    loss_scaler = by_hand(scaler.Static(1.0))
    grads = [tf.constant([1.5e19]), tf.constant([1.5e19])]
    assert loss_scaler.apply(plain_descent, [grads[0], None], ours).finite
    before = raw(ours)
    assert not loss_scaler.apply(plain_descent, grads, ours).finite
    assert raw(ours) == before
