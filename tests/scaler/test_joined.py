"""Joined variables and arithmetic that is traced once: the optimizer's own bits, and nobody can tell from outside."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import BAD, by_hand, laid_out, lay_out_nothing, random_gradients

import scaler
from scaler.backend.graphs import has_gpu
from scaler.gate import joined

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01, weight_decay=0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "EMA": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
}
SHAPES = [(2, 3)] * 3 + [(4,)] * 2 + [(3, 3)] * 2 + [()] + [(5,)] * 3 + [(1, 3)]
ALIKE = SHAPES[:5]
"""Of which an optimizer that can be given joined variables gets two chunks."""
MIXED = [*ALIKE, ()]
STEPS = 4


def weights(dtype, shapes=SHAPES):
    rng = np.random.default_rng(0)
    return [keras.Variable(rng.normal(size=shape), dtype=dtype, name=f"w{i}") for i, shape in enumerate(shapes)]


def train(optimizer, dtype="float32", shapes=SHAPES, **clipping):
    """The bits of every variable at the end of each step: model, masters, slots."""
    model = weights(dtype, shapes)
    masters = scaler.MasterWeights(model) if dtype != "float32" else model
    own = masters.weights if dtype != "float32" else []
    if optimizer.weight_decay:
        optimizer.exclude_from_weight_decay(var_list=[model[1], model[3]])
    loss_scaler = by_hand(scaler.Static(8.0))
    step = tf.function(lambda grads: loss_scaler.apply(optimizer, grads, masters, **clipping).finite)
    seen = []
    for number in range(STEPS):
        assert bool(step(random_gradients(number, dtype, model))) == (number != BAD)
        seen.append([tf.convert_to_tensor(each).numpy().tobytes() for each in (*model, *own, *optimizer.variables)])
    assert step.experimental_get_tracing_count() == 1
    return seen


@pytest.mark.slow_with("nesterov", "Lion")
@pytest.mark.parametrize("name", ["nesterov", "AdamW", "Lion"])
def test_joined_variables_get_the_bits_of_the_optimizers_own_update(name, chunks, monkeypatch):
    ours = train(OPTIMIZERS[name](), "float16", MIXED, clip_norm=0.5)
    assert chunks[0]
    lay_out_nothing(monkeypatch)
    assert ours == train(OPTIMIZERS[name](), "float16", MIXED, clip_norm=0.5)
    assert ours[BAD - 1] == ours[BAD]


@pytest.mark.slow
def test_float32_variables_too_with_another_clipping(chunks, monkeypatch):
    ours = train(keras.optimizers.Adam(0.01), shapes=MIXED, clip=scaler.ClipByValue(0.5))
    assert chunks[0]
    lay_out_nothing(monkeypatch)
    assert ours == train(keras.optimizers.Adam(0.01), shapes=MIXED, clip=scaler.ClipByValue(0.5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amsgrad", "EMA", "Adamax", "Nadam"])
def test_arithmetic_that_is_traced_once_gives_the_same_bits_too(name, monkeypatch):
    called = laid_out(monkeypatch)
    ours = train(OPTIMIZERS[name](), "float16", MIXED, clip_norm=0.5)
    assert called
    lay_out_nothing(monkeypatch)
    assert ours == train(OPTIMIZERS[name](), "float16", MIXED, clip_norm=0.5)
    assert ours[BAD - 1] == ours[BAD]


def test_rows_beside_variables_that_are_laid_out_decay_too(monkeypatch):
    def train():
        model, optimizer = weights("float32", [(4,)] * 5), keras.optimizers.AdamW(0.01, weight_decay=0.1)
        loss_scaler = by_hand(scaler.Static(8.0))
        rows = tf.IndexedSlices(tf.ones([1]), tf.constant([2]), tf.constant([4]))
        tf.function(lambda: loss_scaler.apply(optimizer, [*[tf.ones([4])] * 4, rows], model))()
        return [np.asarray(own).tobytes() for own in model]

    called = laid_out(monkeypatch)
    ours = train()
    assert called
    lay_out_nothing(monkeypatch)
    assert ours == train()


class MyAdam(keras.optimizers.Adam):
    """A user's own class may look at a variable as a whole."""


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [
        (MyAdam(0.01), None),
        (keras.optimizers.Lamb(0.01), None),
        (keras.optimizers.Adam(0.01), scaler.ClipByNorm(0.5)),  # Each gradient has a limit of its own.
    ],
    ids=["my_adam", "lamb", "clip by norm"],
)
def test_others_are_not_given_joined_variables(optimizer, clip, chunks):
    model = weights("float32", ALIKE[:2])  # Which are a chunk for other optimizers.
    optimizer.build(model)
    loss_scaler = by_hand(scaler.Static(8.0))
    step = tf.function(lambda grads: loss_scaler.apply(optimizer, grads, model, clip=clip).finite)
    step.get_concrete_function(random_gradients(0, "float32", model))
    assert not any(chunks)


def test_a_method_that_a_user_put_on_the_optimizer_is_called_for_each_variable(chunks):
    optimizer, called = keras.optimizers.SGD(0.1), []
    update_step = optimizer.update_step
    optimizer.update_step = lambda *arguments: called.append(arguments) or update_step(*arguments)
    train(optimizer, shapes=ALIKE)
    assert len(called) == len(ALIKE)


@pytest.mark.skipif(has_gpu(), reason="rows are joined with others for a GPU")
def test_only_what_is_alike_is_joined(chunks):
    model = weights("float32")
    model[2].overwrite_with_gradient = True
    rows = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]), tf.constant([3, 3]))
    grads = [*random_gradients(0, "float32", model)[:-1], tf.zeros([1, 3], "float16")]
    grads[5] = rows
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["w4"])
    optimizer.build(model)
    assert joined.chunks_of(optimizer, grads, model, None) == [(0, 1), (3, 8, 9)]


def test_values_assigned_to_the_model_are_taken_over(chunks):
    model = weights("float16", [(2,)] * 3)
    masters, optimizer = scaler.MasterWeights(model), keras.optimizers.SGD(1.0)
    loss_scaler = by_hand(scaler.Static(2.0))
    step = tf.function(lambda grads: loss_scaler.apply(optimizer, grads, masters))
    ones = [tf.ones([2], "float16")] * 3
    step(ones)
    model[1].assign([100.0, 200.0])
    step(ones)
    assert chunks[0]
    np.testing.assert_array_equal(model[1], [99.5, 199.5])
    np.testing.assert_array_equal(masters.weights[1], [99.5, 199.5])


def test_a_variable_that_was_moved_can_be_assigned_alone(chunks):
    """What a split gives shares its memory: an assignment to one variable must not show in another."""
    model = weights("float32", [(4,)] * 4)
    loss_scaler, optimizer = by_hand(scaler.Static(1.0)), keras.optimizers.SGD(0.0, momentum=0.9)
    tf.function(lambda grads: loss_scaler.apply(optimizer, grads, model))([tf.zeros([4])] * 4)
    assert chunks[0]
    before = [variable.numpy() for variable in model]
    model[1].value.assign_add(tf.ones([4]))
    model[2].value.scatter_update(tf.IndexedSlices(tf.constant([7.0]), tf.constant([2])))
    np.testing.assert_array_equal(model[0], before[0])
    np.testing.assert_array_equal(model[1], before[1] + 1)
    np.testing.assert_array_equal(model[2], np.where(np.arange(4) == 2, 7.0, before[2]))
    np.testing.assert_array_equal(model[3], before[3])


def test_an_optimizer_that_moves_nothing_is_refused(chunks, monkeypatch):
    """As a release of Keras might, whose update returns new values or assigns by another way."""
    monkeypatch.setattr(keras.optimizers.SGD, "update_step", lambda self, gradient, variable, learning_rate: None)
    with pytest.raises(scaler.UnsupportedVersion, match=r"no longer moves a variable in the optimizer's update_step"):
        train(keras.optimizers.SGD(0.1))
