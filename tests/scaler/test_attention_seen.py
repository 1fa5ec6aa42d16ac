"""Guards that the logits of attention layers are seen as they are, and that it is said where they are not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler
from scaler import observe
from scaler.backend import attention

T, WIDTH = 5, 8


def layer_of(kind, **arguments):
    if kind == "grouped":
        return keras.layers.GroupQueryAttention(4, 4, 2, name="attend", **arguments)
    return keras.layers.MultiHeadAttention(2, 4, name="attend", **arguments)


def model_of(layer, **call):
    keras.utils.set_random_seed(5)
    x = keras.Input([T, WIDTH])
    return keras.Model(x, layer(x, x, **call))


def seen(model, x):
    """What a collection saw of each attention layer, as numbers."""
    watch = observe.watch(model, kinds=["attention"])
    with watch.collect() as collection:
        model(x, training=True)
    return {path: [float(one) for one in observe.attention_of(calls)] for path, calls in collection.scores.items()}


def by_hand(layer, x, mask):
    """The largest logit and the mean entropy in NumPy, from the projected queries and keys."""
    query, key = (np.asarray(one(x), np.float64) for one in (layer._query_dense, layer._key_dense))
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    counts = np.broadcast_to(mask, logits.shape)
    parts = np.where(counts, np.exp(logits), 0.0)
    parts /= np.maximum(parts.sum(axis=-1, keepdims=True), 1e-30)
    entropy = -np.sum(parts * np.log(np.where(parts > 0, parts, 1.0)), axis=-1)
    return [np.abs(logits[counts]).max(), entropy[counts.any(axis=-1)].mean()]


def test_an_emulated_layer_stays_emulated_after_it_was_watched():
    model = model_of(layer_of("heads"))
    x = 3.0 * tf.random.stateless_normal([2, T, WIDTH], (1, 2))
    scaler.formats.emulated("mxfp4")(model)
    before = model(x)
    assert seen(model, x).keys() == {"attend"}
    np.testing.assert_array_equal(model(x), before)


CAUSAL = np.tril(np.ones([T, T], bool))
CALLS = {
    "plain": ({}, {}, True),
    "causal": ({}, {"use_causal_mask": True}, CAUSAL),
    "softmax": ({"dropout": 1e-6}, {}, True),
}


@pytest.mark.parametrize("kind", ["heads", "grouped"])
@pytest.mark.parametrize("call", CALLS)
def test_logits_and_entropy_are_those_by_hand(kind, call):
    arguments, named, mask = CALLS[call]
    layer = layer_of(kind, **arguments)
    model = model_of(layer, **named)
    x = 3.0 * tf.random.stateless_normal([2, T, WIDTH], (1, 2))
    before = dict(vars(layer))
    assert seen(model, x)["attend"] == pytest.approx(by_hand(layer, x, mask), rel=1e-4)
    assert vars(layer).keys() == before.keys()


def test_a_mask_leaves_keys_out_and_a_query_without_any_does_not_count():
    layer = layer_of("heads")
    x, mask = keras.Input([T, WIDTH]), keras.Input([T, T], dtype="bool")
    model = keras.Model([x, mask], layer(x, x, attention_mask=mask))
    given = np.ones([2, T, T], bool)
    given[:, :, 0] = given[0, 2] = given[1, :, 3:] = False
    values = 3.0 * tf.random.stateless_normal([2, T, WIDTH], (1, 2))
    assert seen(model, [values, tf.constant(given)])["attend"] == pytest.approx(
        by_hand(layer, values, given[:, None]), rel=1e-4
    )


def test_one_key_has_an_entropy_of_0_and_equal_keys_the_logarithm_of_their_number():
    def entropy(logits, mask=None):
        return float(observe.attention_of([lambda: attention.Scores(tf.constant(logits), mask, 1)]).entropy)

    assert entropy([[[0.0, -1e4]]]) == 0.0
    assert entropy([[[2.0] * 7]]) == pytest.approx(np.log(7))
    assert entropy([[[2.0, 2.0, 9.0]]], tf.constant([True, True, False])) == pytest.approx(np.log(2))
    assert np.isnan(entropy([[[np.inf, 0.0]]]))
    assert np.isnan(entropy([[[1.0]]], tf.constant([False])))


def test_calls_of_one_layer_are_taken_together_and_an_infinite_logit_is_seen():
    calls = [[[[1.0, 1.0]]], [[[-8.0, -8.0, -8.0]]], [[[0.5]]]]
    made = [lambda logits=logits: attention.Scores(tf.constant(logits, tf.float16), None, 1) for logits in calls]
    logit, entropy = observe.attention_of(made)
    assert (float(logit), float(entropy)) == (8.0, pytest.approx((np.log(2) + np.log(3)) / 3))
    assert np.isinf(observe.attention_of([lambda: attention.Scores(tf.constant([[-np.inf, 1.0]]), None, 1)]).logit)


class Own(keras.layers.MultiHeadAttention):
    def _compute_attention(self, query, key, value, *arguments, **named):
        return value, None


class OtherAttention(keras.layers.Layer):
    def call(self, x, y):
        return tf.nn.softmax(tf.matmul(x, y, transpose_b=True)) @ y


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: Own(2, 4, name="attend"), "in a way of its own"),
        (lambda: OtherAttention(name="attend"), "only keras.layers.MultiHeadAttention and GroupQueryAttention show"),
    ],
)
def test_what_cannot_be_seen_is_said(layer, why):
    model = model_of(layer())
    watch = observe.watch(model, kinds=["attention"])
    with pytest.warns(UserWarning, match=f"shows nothing of 'attention/attend': .*{why}"), watch.collect() as found:
        model(tf.ones([1, T, WIDTH]))
    assert found.scores == {}
    assert watch.left_out == ["attention/attend"]


def test_flash_attention_hides_its_logits_and_that_is_said(monkeypatch):
    layer = layer_of("heads")
    model = model_of(layer)
    watch = observe.watch(model, kinds=["attention"])
    # TensorFlow has no such kernel: this one is as fast.
    monkeypatch.setattr(type(layer), "_compute_attention", _of_keras(lambda self, query, key, value, *_: (value, None)))
    layer._flash_attention = True
    with pytest.warns(UserWarning, match=r"'attention/attend': flash attention"), watch.collect() as found:
        model(tf.ones([1, T, WIDTH]))
    assert found.scores == {}


def _of_keras(function):
    function.__module__ = "keras.src"
    return function


def test_a_model_without_attention_has_none_to_show():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    with (
        pytest.warns(UserWarning, match="'attention': only .* have none of them"),
        observe.watch(model, kinds=["attention"]).collect(),
    ):
        model(tf.ones([1, 2]))


def test_attention_in_a_loop_is_said_to_be_elsewhere():
    layer = layer_of("heads")
    model = model_of(layer)
    watch = observe.watch(model, kinds=["attention"])

    @tf.function
    def looped(x):
        with watch.collect() as found:
            for _ in tf.range(2):
                model(x)
        return found.scores

    with pytest.warns(UserWarning, match="'attend': what runs in a loop"):
        assert looped(tf.ones([1, T, WIDTH])) == {}


def test_without_compute_attention_it_is_said_that_the_logits_are_not_seen():
    told = []
    attention.show_scores(object(), told.append, told.append)
    assert told == [attention.OF_ITS_OWN]


def test_without_softmax_the_logits_are_computed_once_more():
    class Layer:
        _compute_attention = staticmethod(_of_keras(lambda query, key: query))

    seen, layer = [], Layer()
    undo = attention.show_scores(layer, seen.append, pytest.fail)
    layer._compute_attention(tf.ones([1, T, 1, 4]), tf.fill([1, T, 1, 4], 3.0))
    undo()
    assert vars(layer) == {}
    np.testing.assert_array_equal(seen[0]().logits, np.full([1, 1, T, T], 4 * 3.0 / 2))
