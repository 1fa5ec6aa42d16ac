"""Guards clipping by global norm, by norm and by value: after unscaling, in every mode alike, with both norms reported.

The reference is NumPy's, in float64.
"""

import hypothesis.extra.numpy as hnp
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scaler_cases import by_hand, compile_updates, modes_with, plain_descent

import scaler
from scaler import gradients
from scaler.gradients.clipping import ClipByGlobalNorm

SHAPES = ((3,), (2, 2), (5,))


def by_global_norm(grads, limit):
    norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in grads))
    return [grad * (limit / max(norm, limit)) for grad in grads]


def by_norm(grads, limit):
    return [by_global_norm([grad], limit)[0] for grad in grads]


def by_value(grads, limit):
    return [np.clip(grad, -limit, limit) for grad in grads]


KINDS = {
    "clip_norm": (lambda limit: {"clip_norm": limit}, by_global_norm),
    "ClipByNorm": (lambda limit: {"clip": scaler.ClipByNorm(limit)}, by_norm),
    "ClipByValue": (lambda limit: {"clip": scaler.ClipByValue(limit)}, by_value),
}


def true_gradients(seed=0):
    """Norms of about 1, 10 and 0.01, so that a limit of 1 clips some of them."""
    random = np.random.default_rng(seed)
    return [
        factor * random.normal(size=shape).astype(np.float32)
        for factor, shape in zip((1.0, 10.0, 0.01), SHAPES, strict=True)
    ]


def norm_of(grads):
    return np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads))


ALL = [(kind,) for kind in KINDS]


@pytest.mark.slow_with("graph-ClipByValue-0.5")
@modes_with(
    ("kind", "limit"),
    eager=[(kind, limit) for kind in KINDS for limit in (0.5, 1e4)],
    graph=[(kind, 0.5) for kind in KINDS],
)
def test_what_arrives_is_clipped_after_unscaling(execute, kind, limit):
    arguments, reference = KINDS[kind]
    weights = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    loss_scaler = by_hand(scaler.Static(2.0**10))
    run = execute(lambda *grads: tuple(loss_scaler.apply(plain_descent, grads, weights, **arguments(limit))))
    true = true_gradients()
    outcome = scaler.Outcome(*run(*(2.0**10 * grad for grad in true)))
    expected = reference([grad.astype(np.float64) for grad in true], limit)
    for weight, grad, before in zip(weights, expected, true, strict=True):
        np.testing.assert_allclose(weight.numpy(), -grad, rtol=1e-6)
        if np.array_equal(grad, before):
            np.testing.assert_array_equal(weight.numpy(), -before)  # Not a bit of what is small enough is touched.
    np.testing.assert_allclose(outcome.grad_norm, norm_of(true), rtol=1e-6)
    np.testing.assert_allclose(outcome.clipped_norm, norm_of(expected), rtol=1e-6)
    if limit == 1e4:  # Nothing was clipped. By value, the norm is measured again.
        nearly = 1e-6 if kind == "ClipByValue" else 0.0
        np.testing.assert_allclose(outcome.clipped_norm, outcome.grad_norm, rtol=nearly)


@modes_with(("kind",), eager=ALL)
def test_without_anything_to_clip_both_norms_are_the_same(execute, kind):
    arguments = KINDS[kind][0](1e6)
    loss_scaler = scaler.LossScaler(scaler.NoScaling())
    weights = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    run = execute(lambda *grads: tuple(loss_scaler.apply(plain_descent, grads, weights, **arguments)))
    outcome = scaler.Outcome(*run(*true_gradients()))
    if kind == "ClipByValue":  # Measured again.
        np.testing.assert_allclose(outcome.clipped_norm, outcome.grad_norm, rtol=1e-6)
    else:
        assert outcome.clipped_norm.numpy() == outcome.grad_norm.numpy()


@modes_with(("kind",), eager=ALL)
def test_a_skipped_step_was_not_clipped(execute, kind):
    weights = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    loss_scaler = by_hand(scaler.Static(8.0))
    run = execute(lambda *grads: tuple(loss_scaler.apply(plain_descent, grads, weights, **KINDS[kind][0](1.0))))
    bad = true_gradients()
    bad[1][0, 0] = np.inf
    outcome = scaler.Outcome(*run(*bad))
    assert not outcome.finite
    assert np.isnan(outcome.clipped_norm)
    assert not any(weight.numpy().any() for weight in weights)


@modes_with(("kind",), eager=ALL)
def test_rows_of_an_embedding_are_clipped_with_their_sum(execute, kind):
    """Row 1 occurs twice: 3 + 1 are clipped, not 3 and 1."""
    arguments, reference = KINDS[kind]
    table, other = tf.Variable(tf.zeros([4, 2])), tf.Variable(tf.zeros([2]))
    loss_scaler = by_hand(scaler.Static(4.0))

    unused = tf.Variable(1.0)

    def run(values, grad):
        rows = tf.IndexedSlices(values, tf.constant([1, 3, 1]), tf.constant([4, 2]))
        outcome = loss_scaler.apply(plain_descent, [rows, None, grad], [table, unused, other], **arguments(2.0))
        return outcome.clipped_norm

    rows, grad = np.float32([[3, 0], [0, 1], [1, 0]]), np.float32([0, 5])
    norm = execute(run)(4 * rows, 4 * grad)
    dense = np.float64([[0, 0], [4, 0], [0, 0], [0, 1]])
    expected = reference([dense, grad.astype(np.float64)], 2.0)
    np.testing.assert_allclose(table.numpy(), -expected[0], rtol=1e-6)
    np.testing.assert_allclose(other.numpy(), -expected[1], rtol=1e-6)
    np.testing.assert_allclose(norm, norm_of(expected), rtol=1e-6)
    assert unused.numpy() == 1.0


@settings(max_examples=40)
@given(
    hnp.arrays(np.float32, 6, elements=st.floats(-1e6, 1e6, width=32)),
    st.sampled_from([1e-3, 1.0, 5.0, 1e4]),
    st.booleans(),
)
def test_any_gradients(values, limit, in_xla):
    grads = [tf.constant(values[:2]), tf.constant(values[2:])]
    squares = tf.stack([gradients.squared_norm([grad]) for grad in grads])
    found = (_LIMITED if in_xla else _limited)(grads, squares, tf.constant(limit))
    for clipped, (_, reference) in zip(found, KINDS.values(), strict=True):
        expected = reference(np.split(np.float64(values), [2]), limit)
        for ours, theirs in zip(clipped, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-30)


def _limited(grads, squares, limit):
    """By each of the `KINDS`."""
    limiters = [make(limit).limiter(squares) for make in (ClipByGlobalNorm, scaler.ClipByNorm, scaler.ClipByValue)]
    return [[gradients.limit(grad, one, position) for position, grad in enumerate(grads)] for one in limiters]


_LIMITED = tf.function(_limited, jit_compile=True)


def eager(step):
    """The rules of a graph hold here, too, at no trace."""
    return step


def trained(kind, dtype="float32", scale=8.0, wrap=tf.function):
    random = np.random.default_rng(0)
    model = [keras.Variable(random.normal(size=(4, 2 + number)), dtype=dtype) for number in range(2)]
    masters = scaler.MasterWeights(model)
    optimizer = keras.optimizers.Adam(0.1)
    loss_scaler = by_hand(scaler.Static(scale))
    step = wrap(lambda grads: loss_scaler.apply(optimizer, grads, masters, **KINDS[kind][0](0.5)))
    norms = []
    for _ in range(3):
        grads = [scale * random.normal(size=variable.shape) * 10.0 ** random.uniform(-2, 1) for variable in model]
        outcome = step([tf.constant(grad, dtype) for grad in grads])
        assert outcome.finite
        norms.append([outcome.grad_norm.numpy(), outcome.clipped_norm.numpy()])
    variables = [*model, *masters.weights, *optimizer.variables]
    return [np.asarray(norms), *(tf.convert_to_tensor(variable).numpy().astype(np.float64) for variable in variables)]


@pytest.mark.slow
def test_clusters_clip_as_the_graph_does(monkeypatch):
    plain = trained("clip_norm", wrap=eager)
    made = compile_updates(monkeypatch, 2)
    for one, other in zip(trained("clip_norm"), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert made


@pytest.mark.slow
def test_a_power_of_two_scale_changes_no_bit():
    ends = (trained("ClipByValue", scale=scale, wrap=eager) for scale in (2.0**30, 1.0))
    for one, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, other)
