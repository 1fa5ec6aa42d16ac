"""Guards `observe.probe` and `observe.watch`: what they see, what they leave alone, what they refuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from exponent_cases import reference
from scaler_cases import said
from ways import graph

import scaler
from scaler import observe

X = np.float32([[1.0, -3.0], [0.0, 0.5]])


class Squared(keras.layers.Layer):
    """x * x, of which a probe sees the square; `inside` says in which graph."""

    def __init__(self, inside=None, **arguments):
        super().__init__(**arguments)
        self.inside = inside

    def call(self, x):
        square = x * x
        if self.inside == "loop":
            found = tf.while_loop(lambda i, s: i < 1, lambda i, s: (i + 1, observe.probe(s, "square")), (0, square))
            return found[1]
        return observe.probe(square, "square")


def model_of(*layers):
    return keras.Sequential([keras.Input([2]), *layers])


def collected(watch, x=X, loss=lambda y: tf.reduce_sum(3.0 * y)):
    """The rows of one forward and backward pass, and the model's gradient with respect to x."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with watch.collect() as collection:
            value = loss(watch.model(x, training=True))
    grad = tape.gradient(value, x)
    return collection.rows(), grad, collection


def operations(function):
    return len(graph(function).get_concrete_function(tf.TensorSpec([2, 2])).graph.get_operations())


def test_outside_of_a_collection_a_probe_is_nothing():
    x = tf.constant(X)
    assert observe.probe(x, "x") is x
    assert operations(lambda x: observe.probe(x * x, "x")) == operations(lambda x: x * x)


def test_values_forward_and_gradients_backward():
    rows, grad, _ = collected(observe.watch(model_of(Squared(name="outer"))))
    assert list(rows) == [f"{kind}/{name}" for kind in observe.KINDS[:2] for name in ("square", "outer")]
    counts, amax = observe.measured(rows)
    expected = [X * X, X * X, np.full_like(X, 3), np.full_like(X, 3)]
    np.testing.assert_array_equal(counts, [reference(values) for values in expected])
    np.testing.assert_array_equal(amax, [9, 9, 3, 3])
    np.testing.assert_array_equal(grad, 6 * X)


def test_xla_counts_as_eager_does():
    watch = observe.watch(model_of(Squared())).only(["square"])

    def counts(x):
        return observe.measured(collected(watch, x)[0])

    for ours, expected in zip(graph(counts, jit_compile=True)(tf.constant(X)), counts(X), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_the_largest_magnitude_is_infinity_or_nan_where_there_is_one():
    rows = {"a": [[1.0, -np.inf]], "b": [[np.nan, np.inf]], "c": [np.zeros([0], np.float32)], "d": [[-2.0], [1.0]]}
    rows |= {
        "e": [tf.constant([2.0**-24], tf.float16)],
        "f": [tf.bitcast(tf.constant([0x8001], tf.uint16), tf.bfloat16)],
        "g": [None],
    }
    amax = observe.measured(rows).amax.numpy()
    np.testing.assert_array_equal(amax, np.float32([np.inf, np.nan, 0, 2, 2.0**-24, 2.0**-133, 0]))


def test_a_layer_called_twice_has_one_row():
    shared = keras.layers.Dense(2, name="shared", kernel_initializer="identity")
    x = keras.Input([2])
    rows, _, _ = collected(observe.watch(keras.Model(x, shared(shared(x)))))
    (counts, _), amax = observe.measured(rows)
    np.testing.assert_array_equal(counts, reference(np.stack([X, X])))
    np.testing.assert_array_equal(amax, [3, 3])


class Block(keras.Model):
    """Nested models and lists, and a step of its own after them."""

    def __init__(self):
        super().__init__(name="block")
        self.inner = keras.Sequential([keras.layers.Dense(2, name="dense")], name="inner")
        self.listed = [keras.layers.Dense(2, name="dense"), keras.layers.ReLU(name="relu")]

    def call(self, x):
        for layer in (self.inner, *self.listed):
            x = layer(x)
        return {"logits": x + 1, "classes": tf.argmax(x, -1)}


def test_nested_layers_by_path_and_a_subclass_by_its_name():
    watch = observe.watch(Block())
    rows, _, _ = collected(watch, loss=lambda y: tf.reduce_sum(y["logits"]))
    names = ["inner/dense", "dense", "relu", "block"]
    assert [name.partition("/")[2] for name in rows] == names * 2
    assert not any("call" in vars(layer) for layer in observe.layers_of(watch.model))


def test_layers_are_asked_for_by_path_name_or_themselves():
    model = Block()
    for asked, name in (("inner/dense", "inner/dense"), ("relu", "relu"), (model.listed[1], "relu")):
        rows, _, _ = collected(observe.watch(model, [asked]), loss=lambda y: tf.reduce_sum(y["logits"]))
        assert list(rows) == [f"{kind}/{name}" for kind in observe.KINDS[:2]]


def test_layers_of_one_name_have_paths_of_their_own():
    model = Block()
    model.more = [keras.layers.Dense(2, name="dense"), keras.layers.Dense(2, name="dense")]
    paths = observe.layers_by_path(model)
    assert [path for path in paths if "dense" in path] == ["dense", "dense:2", "dense:3", "inner/dense"]
    assert paths["dense:3"] is model.more[1]


def test_an_exception_in_the_forward_pass_leaves_the_model_as_it_was():
    model = Block()
    own = model.listed[1].call = lambda x: x  # As users replace a method.
    watch = observe.watch(model)

    def forward():
        with watch.collect():
            assert "call" in vars(model.inner.layers[0])
            raise KeyError

    with pytest.raises(KeyError):
        forward()
    assert not any("call" in vars(layer) for layer in observe.layers_of(model) if layer is not model.listed[1])
    assert model.listed[1].call is own
    assert observe.probe(x := tf.constant(X), "after") is x


def test_what_runs_in_a_loop_is_left_out_and_named():
    watch = observe.watch(model_of(Squared("loop", name="outer")))

    @graph
    def step(x):
        with watch.collect() as collection:
            watch.model(x)
        return list(collection.rows()), collection.left_out

    with pytest.warns(UserWarning, match="shows nothing of 'square': what runs in a loop") as told:
        rows, left_out = step(tf.constant(X))
    assert (told[0].filename, told[0].lineno) == ("<observe.watch>", 0)
    assert [b.numpy().decode() for b in rows] == ["activations/outer"]
    assert [b.numpy().decode() for b in left_out] == ["square"]
    assert watch.left_out == ["square"]
    graph(step.python_function)(tf.constant(X))  # Once.


def test_other_passes_are_not_counted():
    """Not the inner gradient of a penalty, the forward pass that is repeated, or a second backward pass."""
    model = model_of(keras.layers.Dense(1, name="dense"))
    watch = observe.watch(model)
    with tf.GradientTape(persistent=True) as tape:
        x = tf.constant(X)
        tape.watch(x)
        with watch.collect() as collection:
            with tf.GradientTape() as inner:
                inner.watch(x)
                value = tf.reduce_sum(model(x))
            penalty = tf.reduce_sum(inner.gradient(value, x) ** 2)
            again = tf.recompute_grad(lambda x: observe.probe(5.0 * x, "again"))(x)
            value += penalty + tf.reduce_sum(again)
    tape.gradient(value, x)
    rows = collection.rows()
    tape.gradient(value, x)
    assert {name: len(tensors) for name, tensors in rows.items()} == {
        "activations/dense": 1,
        "activations/again": 1,
        "activation_gradients/dense": 1,
    }
    np.testing.assert_array_equal(rows["activation_gradients/dense"][0], np.ones([2, 1]))


def test_what_keras_keeps_on_an_output_stays_on_it():
    """Padding is masked behind a watched layer, and the loss of a softmax is taken of its logits."""
    tokens = np.int32([[3, 0], [1, 2]])
    embedded = keras.Sequential(
        [
            keras.Input([2], dtype="int32"),
            keras.Sequential([keras.layers.Embedding(4, 2, mask_zero=True)]),
            Squared(name="squared"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    embedded.layers[1].supports_masking = True
    loss = keras.losses.CategoricalCrossentropy()
    target = np.float32([[1, 0], [0, 1]])
    seen = []

    def losses(y):
        seen.append((hasattr(y, "_keras_logits"), float(loss(target, y))))
        return loss(target, y)

    watch = observe.watch(embedded)
    with tf.GradientTape(), watch.collect():
        losses(embedded(tokens))
    losses(embedded(tokens))
    assert seen[0] == seen[1]
    assert seen[0][0]


class Gathering(keras.layers.Layer):
    def call(self, x):
        return tf.gather(x, [0, 0])


def test_a_sparse_gradient_is_counted_and_passed_on():
    rows, grad, _ = collected(observe.watch(model_of(Squared(), Gathering())))
    (sparse,) = rows["activation_gradients/square"]
    counts = observe.exponents(sparse).numpy()
    assert counts[observe.bin_of(1)] == 4  # Of 3, the two of the first row twice: duplicate indices one by one.
    np.testing.assert_array_equal(tf.convert_to_tensor(grad), [[12, -36], [0, 0]])


def test_what_cannot_work_is_refused(snapshot):
    number, block = tf.constant(1.0), Block()
    model = keras.Sequential([keras.Input([2]), Squared(name="outer")], name="model")
    probes = [(number, ""), (number, 3), (tf.constant(1), "x"), (1.0, "x"), (keras.KerasTensor([2]), "x")]
    watches = [{"model": "relu"}, {"layers": "dense"}, {"layers": [3]}, {"every": 0}]
    watches += [{"every": True}, *({"kinds": kinds} for kinds in (3, [["a"]], "weights", ["weight"], []))]
    fewer = observe.watch(model).only(["square", "outer"])
    calls = [
        *(lambda one=one: observe.probe(*one) for one in probes),
        *(lambda one=one: observe.watch(**{"model": block, **one}) for one in watches),
        *(lambda names=names: fewer.only(names) for names in ("dense", None, [], [3], ["square", "relu"])),
        *(lambda rows=rows: observe.measured(rows) for rows in ([number], {"a": tf.constant([1.0])}, None)),
        lambda: collected(observe.watch(block, ["other"])),
        lambda: observe.watch(block, ["other"]).names,
        lambda: collected(observe.watch(model, kinds=observe.KINDS[:1]).only(["nope"])),
        lambda: collected(observe.watch(model, kinds=["weights"]).only(["nope"])),
    ]
    assert [said(call) for call in calls] == snapshot


def test_a_probe_with_the_name_of_a_layer_is_refused():
    watch = observe.watch(model_of(Squared(name="square")))
    with pytest.raises(scaler.InvalidArgument, match="a layer has this name"):
        collected(watch)


class Idle(keras.Model):
    """A probe, a layer that is never called, and one without a float output."""

    def __init__(self):
        super().__init__(name="idle")
        self.never = keras.layers.ReLU(name="never")
        self.whole = keras.layers.Lambda(lambda x: tf.cast(x, tf.int32), name="whole")

    def call(self, x):
        self.whole(x)
        return observe.probe(x * x, "square")


@pytest.mark.parametrize(
    ("name", "why"), [("never", "in this forward pass it is never called"), ("whole", "it has no float16, bfloat16")]
)
def test_what_was_asked_for_and_shows_nothing_is_named_unless_it_was_taken_out(name, why):
    watch = observe.watch(Idle(), [name])
    with pytest.warns(UserWarning, match=f"shows nothing of '{name}': {why}"):
        collected(watch)
    assert watch.left_out == [name]
    collected(watch)  # Once.
    assert list(collected(watch.only(["square"], ["activations"]))[0]) == ["activations/square"]
    assert collected(watch.only([name], ["weights"]))[0] == {}


def test_a_layer_without_a_row_of_its_own_says_so():
    model = keras.Sequential([keras.Input([2]), keras.Sequential([keras.layers.ReLU(name="relu")], name="inner")])
    with pytest.warns(UserWarning, match="nothing of 'inner': its outputs are not watched"):
        collected(observe.watch(model).only(["inner"]))


def test_a_second_collection_at_once_is_refused_and_one_after_the_other_is_right():
    watches = [observe.watch(model_of(Squared(name=name))) for name in ("first", "second")]
    x = tf.constant(X)
    refused = pytest.raises(scaler.InvalidArgument, match="another collection is open")
    with refused, watches[0].collect(), watches[1].collect():
        raise AssertionError
    assert not any("call" in vars(layer) for layer in observe.layers_of(watches[1].model))
    with tf.GradientTape() as tape:
        tape.watch(x)
        with watches[0].collect() as first:
            y = watches[0].model(x)
        with watches[1].collect() as second:
            y = watches[1].model(y)
    tape.gradient(y, x)
    for collection, name in ((first, "first"), (second, "second")):
        rows = collection.rows()
        assert list(rows) == [f"{kind}/{each}" for kind in observe.KINDS[:2] for each in ("square", name)]
        assert all(len(tensors) == 1 for tensors in rows.values())


def test_rows_that_are_asked_for_early_are_those_there_are_and_all_later():
    watch, x = observe.watch(model_of(Squared(name="outer")), ["outer"]), tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with watch.collect() as collection:
            y = watch.model(x)
    early = list(collection.rows())
    assert early == ["activations/square", "activations/outer"]
    tape.gradient(y, x)
    assert list(collection.rows()) == [*early, "activation_gradients/square", "activation_gradients/outer"]


def test_swallowed_updates_are_those_that_rounding_loses():
    weights = tf.constant([1.0, 1.0, 1.0, 0.0, -0.0, 2.0**-24], tf.float16)
    updates = tf.constant([2.0**-12, 2.0**-10, 0.0, 2.0**-30, 2.0**-30, -(2.0**-24)])
    assert float(observe.swallowed_share(weights, updates)) == np.float32(3 / 5)
    assert float(observe.swallowed_share(tf.constant([1.0]), tf.constant([2.0**-25]))) == 1
    assert float(observe.swallowed_share(tf.constant([1.0]), tf.constant([0.0]))) == 0
