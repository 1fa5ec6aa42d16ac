"""Guards that a weight's gradient is taken off the scale of the group that reads it, whatever layer owns it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler

L = keras.layers


class Reads(L.Layer):
    """Multiplies by a matrix that another layer owns."""

    def __init__(self, owner, read=lambda matrix: matrix, **arguments):
        super().__init__(**arguments)
        self.owner, self.read = owner, read

    def call(self, h):
        matrix = keras.ops.transpose(self.read(self.owner.embeddings))
        return keras.ops.matmul(h, matrix)

    def compute_output_shape(self, shape):
        return (*shape[:-1], 10)


class Looping(Reads):
    """Reads it inside of a loop."""

    def call(self, h):
        def body(step, total):
            return step + 1, total + super(Looping, self).call(h)

        return tf.while_loop(lambda step, total: step < 2, body, [0, super().call(h)])[1]


class Nested(Reads):
    """Reads it inside of a function of its own."""

    @tf.function
    def _inner(self, h):
        return super().call(h)

    def call(self, h):
        return self._inner(h)


class Passes(L.Layer):
    """Hands what it was given to another layer, past everything between them."""

    def call(self, h):
        self.seen = h
        return h * 1.0


def tied(head):
    """An embedding, a cut, and a head that may use the embedding's matrix."""
    embedding, x = L.Embedding(10, 4, name="embedding"), keras.Input([6], dtype="int32")
    passes = Passes(name="passes")
    h = L.Dense(4, activation="tanh", name="cut")(passes(embedding(x)))
    return keras.Model(x, head(embedding, passes)(h))


def by_a_sub_model(embedding, passes):
    x = keras.Input([6, 4])
    return keras.Model(x, Reads(embedding)(x), name="head")


HEADS = {
    "closure": lambda embedding, passes: L.Lambda(lambda h: h @ tf.transpose(embedding.embeddings), name="head"),
    "attribute": lambda embedding, passes: Reads(embedding, name="head"),
    "loop": lambda embedding, passes: Looping(embedding, name="head"),
    "function": lambda embedding, passes: Nested(embedding, name="head"),
    "sub-model": by_a_sub_model,
    "operation": lambda e, passes: lambda h: keras.ops.einsum("btd,vd->btv", h, e.embeddings),
    "values that pass the cut": lambda embedding, passes: L.Lambda(lambda h: h + passes.seen, name="head"),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_weight_that_is_read_on_both_sides_of_a_cut_is_refused(head):
    by = {"operation": "operation 'einsum", "values that pass the cut": "layer 'embedding'"}.get(head, "layer 'head'")
    said = f"^weight 'embedding/embeddings' is used in group 'cut' by layer 'embedding' and in 'outputs' by {by}"
    with pytest.raises(scaler.InvalidArgument, match=said):
        scaler.layerwise.insert_rescales(tied(HEADS[head]), "cut")


def test_a_variable_of_no_layer_that_is_read_on_both_sides_is_refused():
    free, x = tf.Variable(np.ones([4, 4], np.float32), name="free"), keras.Input([4])
    h = L.Lambda(lambda h: h @ free, name="cut")(x)
    with pytest.raises(scaler.InvalidArgument, match="weight 'free:0' is used in group 'cut' by layer 'cut'"):
        scaler.layerwise.insert_rescales(keras.Model(x, L.Lambda(lambda h: h @ free, name="head")(h)), "cut")


def test_a_frozen_weight_may_be_thawed_later_and_is_refused():
    model = tied(HEADS["attribute"])
    model.layers[1].trainable = False
    with pytest.raises(scaler.InvalidArgument, match="weight 'embedding/embeddings' is used in group 'cut'"):
        scaler.layerwise.insert_rescales(model, "cut")


def test_a_model_that_cannot_be_traced_is_refused():
    x = keras.Input([4])
    sized = L.Lambda(lambda h: h * np.ones([h.shape[0], 1]), output_shape=lambda shape: shape)
    with pytest.raises(scaler.InvalidArgument, match="could not be traced for inputs of its own shapes"):
        scaler.layerwise.insert_rescales(keras.Model(x, sized(L.Dense(4, name="cut")(x))), "cut")


class Table(L.Layer):
    """Adds a table that is never trained."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[-1:], initializer="ones", trainable=False)

    def call(self, h):
        return h + self.table


class Holds(L.Layer):
    """Owns a layer that it does not call."""

    def __init__(self, held, **arguments):
        super().__init__(**arguments)
        self.held = held

    def call(self, h):
        return h * 1.0


def shared_in_one_group(x, owner):
    twice, norm = L.Dense(4, name="twice"), L.BatchNormalization()
    h = L.Dense(4, name="cut")(norm(twice(norm(twice(x)))))
    return L.Dense(1)(h)


def read_by_another_group_alone(x, owner):
    h = L.Dense(4, name="cut")(Holds(owner)(x))
    return Reads(owner, name="head")(h)


def a_table_on_both_sides(x, owner):
    table = Table()
    return L.Dense(4, name="last")(table(L.Dense(4, name="cut")(table(L.Dense(4)(x)))))


def without_a_gradient(x, owner):
    h = L.Dense(4, name="cut")(L.Dense(4)(Reads(owner)(x)))
    return Reads(owner, tf.stop_gradient, name="head")(h)


def as_a_constant(x, owner):
    h = L.Dense(4, name="cut")(L.Dense(4)(Reads(owner)(x)))
    return keras.ops.matmul(h, keras.ops.transpose(keras.ops.convert_to_tensor(owner.embeddings.numpy())))


@pytest.mark.parametrize(
    "make", [shared_in_one_group, read_by_another_group_alone, a_table_on_both_sides, without_a_gradient, as_a_constant]
)
def test_what_has_one_scale_is_not_refused_and_has_its_gradient(make):
    keras.utils.set_random_seed(0)
    owner = L.Embedding(10, 4, name="owner")
    owner.build(None)
    x = keras.Input([4])
    model = keras.Model(x, make(x, owner))
    variables = model.trainable_variables
    rescaled, layerwise = scaler.layerwise.insert_rescales(model, "cut")
    layerwise._scales["*"]._state["loss_scale"].assign([4.0, 1024.0])
    batch, found = tf.constant(np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(4, 4)), []
    for one in (model, rescaled):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(one(batch, training=True)))
        grads = tape.gradient(loss, variables) if one is model else layerwise.gradient(tape, loss, variables)[0]
        found.append([tf.convert_to_tensor(grad).numpy().tobytes() for grad in grads if grad is not None])
    assert found[0] == found[1]
    assert found[0]


def test_a_variable_of_no_layer_belongs_to_the_group_that_reads_it():
    free, x = keras.Variable(np.ones([4, 4], np.float32)), keras.Input([4])
    h = L.Lambda(lambda h: h @ free, name="cut")(x)
    rescaled, layerwise = scaler.layerwise.insert_rescales(keras.Model(x, L.Dense(1)(h)), "cut")
    layerwise._scales["*"]._state["loss_scale"].assign([4.0, 1024.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(rescaled(tf.ones([2, 4])))
    (grad,), _ = layerwise.gradient(tape, loss, [free])
    np.testing.assert_allclose(grad, np.tile(2 * rescaled.weights[0].numpy().T, [4, 1]), rtol=1e-6)
