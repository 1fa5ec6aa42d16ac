"""Guards what lint finds under stress and on the sample, what it leaves alone, and that it changes nothing."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from lint_cases import HALF, MSE, L, batch, dataset, function, functional, heavy, named, scaled, small, train_step
from rigs import raw

import loops
import scaler
from loops.observe import lint
from scaler.observe import layers_of

pytestmark = pytest.mark.slow


@keras.saving.register_keras_serializable("lint_cases")
class ByHand(L.Layer):
    """Attention written by hand, inside of a layer that calls others."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.project = L.Dense(8, dtype=self.dtype_policy, name="by_hand_inside")

    def call(self, x):
        queries = self.project(x)
        return tf.matmul(tf.nn.softmax(tf.matmul(queries, queries, transpose_b=True)), x)


FLAT = {
    "unit": L.UnitNormalization,
    "ones": lambda **a: L.Dense(1, kernel_initializer="ones", **a),
    "large_weights": lambda **a: L.Dense(8, kernel_initializer=keras.initializers.RandomUniform(-1e4, 1e4), **a),
    "beyond": lambda **a: L.Dense(8, kernel_initializer=keras.initializers.Constant(1e5), **a),
    "epsilon": lambda name, dtype: function(name, lambda x: x / (tf.reduce_sum(x * x, -1, keepdims=True) + 1e-8)),
    "mask": lambda name, dtype: function(name, lambda x: x + tf.cast(x > 0, x.dtype) * -1e9),
    "clamp": lambda name, dtype: function(name, lambda x: tf.clip_by_value(x, 0.0, 1 - 1e-6)),
    "square": lambda name, dtype: function(name, tf.square),
    "tanh_gelu": lambda name, dtype: function(name, lambda x: keras.ops.gelu(x, approximate=True)),
}
SERIES = {
    "attention": lambda **a: lambda x: L.Attention(**a)([x, x]),
    "by_hand": ByHand,
}
# What `test_lint_healthy.py` has in its models is not here.
FINE = {
    "group_norm": lambda **a: L.GroupNormalization(4, **a),
    "batch_norm_1e-12": lambda **a: L.BatchNormalization(epsilon=1e-12, **a),
    "softmax": L.Softmax,
    "elu": L.ELU,
    "softplus": lambda **a: L.Activation("softplus", **a),
    "spectral": lambda **a: L.SpectralNormalization(L.Dense(8, dtype=HALF, name="spectral_inside"), **a),
    "he": lambda **a: L.Dense(64, kernel_initializer="he_normal", activation="relu", **a),
    "limits": lambda name, dtype: function(name, lambda x: tf.clip_by_value(x, -1e9, 1e9)),
    "product": lambda **a: lambda x: L.Multiply(**a)([x, x]),
}
FINE_SERIES = {"each": lambda **a: L.TimeDistributed(L.Dense(8, dtype=HALF, name="each_inside"), **a)}
if hasattr(L, "RMSNormalization"):  # From Keras 3.9 on.
    FINE["rms_norm"] = L.RMSNormalization


FROM_300 = {"square", "tanh_gelu", *SERIES}
"""These fail at inputs of 300 and more: it is a finding where the sample's inputs reach 30."""


def side_by_side(flat, series, size=1.0):
    """One model with all of these layers, each on inputs of this size, and what lint says of it."""
    keras.utils.set_random_seed(0)
    with warnings.catch_warnings():
        # NumPy says so of the masks, when Keras calls these layers for their shapes.
        warnings.filterwarnings("ignore", "overflow encountered in cast", RuntimeWarning)
        numbers, steps = keras.Input([8], name="numbers"), keras.Input([4, 8], name="steps")
        flats = [make(name=name, dtype=HALF)(numbers) for name, make in flat.items()]
        flats += [L.Flatten(dtype=HALF)(make(name=name, dtype=HALF)(steps)) for name, make in series.items()]
        outputs = L.Dense(8, dtype="float32", name="head")(L.Concatenate(dtype="float32")(flats))
        model = keras.Model([numbers, steps], outputs)
    x = np.full([4, 8], size), np.full([4, 4, 8], size)
    return lint(model, scaled(), MSE, (x, np.ones([4, 8], np.float32)))


@pytest.fixture(scope="module")
def of_the_bad():
    return side_by_side(FLAT, SERIES)


@pytest.fixture(scope="module")
def of_the_large():
    return side_by_side({name: make for name, make in FLAT.items() if name in FROM_300}, SERIES, size=30.0)


@pytest.fixture(scope="module")
def of_the_fine():
    return side_by_side(FINE, FINE_SERIES)


HURTS = [
    ("unit", "UnitNormalization fails in float16", "forward with inputs of magnitude 0, 0.0001, "),
    ("attention", "Attention fails in float16: its output is NaN", "300, 1000, 5000"),
    ("by_hand", "ByHand fails in float16", "300, 1000"),
    ("large_weights", "enlarges its input", "in float32; float16 ends at 65504"),
    ("beyond", "a weight is too large for float16", "is 100000; float16 ends at 65504"),
    ("epsilon", "the constant 1e-08 is 0", "/add/y is 0"),
    ("mask", "the constant -1e+09 is -inf", "/mul/y is -inf"),
    ("clamp", "the constant 0.999999 is 1", "1 - 2^-11"),
    ("square", "enlarges its input", "At inputs of 300 the output is 9e+04"),
    ("tanh_gelu", "its gradient is NaN", "failed backward with inputs of magnitude 300, "),
]


def test_what_hurts_is_found(of_the_bad, of_the_large):
    for layer, finding, measured in HURTS:
        found = named(of_the_large if layer in FROM_300 else of_the_bad, layer)
        assert any(finding in one.finding and measured in one.measured and one.instead for one in found), found


def test_a_sum_of_sixteen_is_too_many_and_one_of_eight_is_not(of_the_bad):
    assert named(of_the_bad, "ones") == []
    model = keras.Sequential([keras.Input([16]), L.Dense(1, kernel_initializer="ones", dtype=HALF, name="sum")])
    (found,) = named(lint(model, scaled(), MSE, (np.full([4, 16], 500.0), np.ones([4, 1]))), "sum")[-1:]
    assert found.finding.startswith("Dense enlarges its input 15")
    assert "At inputs of 5000 the output is 7" in found.measured


def test_what_needs_inputs_that_the_model_was_not_seen_to_give_is_a_note(of_the_bad):
    for layer in FROM_300:
        (found,) = [one for one in of_the_bad if one.layer == layer and "not a multiple of 8" not in one.measured]
        assert found.is_note
        assert found.measured.endswith("On your sample its inputs reach 1.")
        assert found.instead.startswith("Nothing, as long as its inputs stay in this range. Otherwise ")


def test_nothing_else_is_said_of_any(of_the_bad, of_the_large, of_the_fine):
    assert heavy(of_the_fine) == []
    assert {one.layer for one in heavy(of_the_bad)} == {*FLAT} - FROM_300 - {"ones"}
    assert {one.layer for one in heavy(of_the_large)} == FROM_300
    assert [one.is_note for one in of_the_bad] == sorted(one.is_note for one in of_the_bad)


def test_a_layer_that_runs_another_twice_is_left_alone_but_for_the_shapes_of_its_steps():
    layers = [L.Bidirectional(L.SimpleRNN(6, dtype=HALF, name="r"), dtype=HALF), L.Dense(8, dtype="float32")]
    model = keras.Sequential([keras.Input([2, 8]), *layers])
    found = lint(model, scaled(), MSE, (np.ones([4, 2, 8]), np.ones([4, 8])))
    assert heavy(found) == []
    assert {"forward_r", "backward_r"} <= {one.layer for one in found}


# ---------------------------------------------------------------------------------------------- on the sample itself


@keras.saving.register_keras_serializable("lint_cases")
class Sampling(L.Layer):
    """Two inputs, whose exponential overflows."""

    def call(self, inputs):
        mean, variance = inputs
        return mean + tf.exp(variance)


@keras.saving.register_keras_serializable("lint_cases")
class Penalty(L.Layer):
    """Adds a loss that overflows in float16, and leaves the output alone."""

    def call(self, x):
        self.add_loss(keras.ops.sum(keras.ops.square(100 * x)))
        return x


@pytest.mark.exhaustive_with("exp", "z", "kl")
@pytest.mark.parametrize(
    ("body", "size", "layer", "said", "measured"),
    [
        (lambda h: keras.ops.exp(h), 20, "exp", "the output is infinite", "the operation Exp of exp, whose inputs"),
        (
            lambda h: Sampling(dtype=HALF, name="z")([h, h]),
            20,
            "z",
            "the output is infinite",
            "the operation Exp of z (tests/loops/diagnose/test_lint.py:",
        ),
        (
            lambda h: Penalty(dtype=HALF, name="kl")(h),
            5,
            "kl",
            "model.losses[0] is infinite",
            "the operation Square of kl (tests/loops/diagnose/test_lint.py:",
        ),
        (lambda h: h, 1e5, "model", "the output is infinite", "the operation Cast"),
    ],
    ids=["exp", "z", "kl", "model"],
)
@pytest.mark.usefixtures("unstressed")
def test_what_is_infinite_on_the_sample_in_float16_alone(body, size, layer, said, measured):
    keras.backend.clear_session()
    x = np.full([16, 8], 0.1, np.float32)
    x[12] = size  # Behind the examples that are traced.
    model = functional(body)
    (found,) = heavy(lint(model, scaled(), MSE, (x, batch()[1])))
    # In Keras 3.8 the cast of the inputs is an operation of the model, which stays in float16.
    assert found.layer in ((model.name, "cast") if layer == "model" else (layer,))
    assert found.finding.startswith(f"on your sample {said}")
    ends = "to which the model itself casts." if found.layer == "cast" else "in float16; finite in float32."
    assert found.finding.endswith(ends)
    assert measured in found.measured
    assert ("Scale the data" in found.instead) == (layer == "model")


@pytest.mark.usefixtures("unstressed")
def test_what_float32_does_not_help_is_said_so():
    (found,) = heavy(lint(functional(lambda h: keras.ops.log(h - 10)), scaled(), MSE, batch()))
    assert "not finite in float32 either: the cause is the model or the sample itself" in found.finding


@pytest.mark.usefixtures("unstressed")
def test_a_sample_that_is_not_finite_itself():
    x, y = batch()
    y[3, 3] = -np.inf
    (found,) = heavy(lint(small(), scaled(), MSE, (x, y)))
    assert found.finding.startswith("y of the sample holds a value that is infinite")


@pytest.mark.usefixtures("unstressed")
def test_of_a_dataset_the_first_batch_is_taken():
    assert heavy(lint(small(), scaled(), MSE, dataset())) == []


# ---------------------------------------------------------------------------------------------- what it is run on


@keras.saving.register_keras_serializable("lint_cases")
class Subclassed(keras.Model):
    """Not built before its first batch; a layer of the same name twice, and a fault in a nested one."""

    def __init__(self):
        super().__init__(name="subclassed")
        self.words = L.Embedding(10, 8, dtype=HALF, mask_zero=True, name="words")
        self.pool = L.GlobalAveragePooling1D(dtype=HALF, name="pool")
        self.inner = keras.Sequential([L.UnitNormalization(dtype=HALF, name="same")], name="inner")
        self.same = L.Dense(8, dtype=HALF, name="same")
        self.last = L.Dense(8, dtype="float32", name="last")

    def call(self, x, training=False):
        return self.last(self.inner(self.same(self.pool(self.words(x)))))


def test_a_subclassed_model_of_integers_that_is_not_built():
    model = Subclassed()
    findings = lint(model, scaled(), MSE, (np.ones([4, 3], np.int32), np.ones([4, 8], np.float32)))
    assert model.built
    assert {one.layer.split("/")[-1] for one in heavy(findings)} == {"same"}
    assert all("UnitNormalization" in one.finding or "constant" in one.finding for one in heavy(findings))


def test_nothing_is_changed():
    model = keras.Sequential(
        [
            keras.Input([8]),
            L.Dense(8, dtype=HALF),
            L.BatchNormalization(dtype=HALF),
            L.SpectralNormalization(L.Dense(8, dtype=HALF), dtype=HALF),
            L.Dropout(0.5, dtype=HALF, seed=3),
            L.GaussianNoise(0.5, dtype=HALF),
            L.Dense(8, dtype="float32"),
        ]
    )
    step = train_step(model)
    step(batch())
    variables = [*model.variables, *step.optimizer.variables]
    before, policies = raw(variables), [layer.dtype_policy for layer in layers_of(model)]
    random = np.random.get_state()[2]
    lint(model, step, MSE, batch())
    assert raw(variables) == before
    assert all(one.dtype_policy is policy for one, policy in zip(layers_of(model), policies, strict=True))
    assert not any("call" in vars(layer) for layer in layers_of(model))
    assert np.random.get_state()[2] == random


def test_what_breaks_a_layer_under_stress_is_put_back_and_said():
    class Once(L.Layer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.left = 2

        def call(self, x):
            self.left -= 1
            if self.left < 0:
                raise ValueError("not again")
            return x * 2

    model = keras.Sequential([keras.Input([8]), L.Dense(8, dtype=HALF), L.Dense(8, dtype="float32")])
    once = Once(dtype=HALF, name="once")
    outer = keras.Sequential([keras.Input([8]), once, *model.layers])
    once.left = 3  # The two traces of the model, and its run on the sample.
    (found,) = [one for one in lint(outer, scaled(), MSE, batch()) if one.layer == "once"]
    assert found.is_note
    assert "Run alone, it raised ValueError" in found.measured
    assert "call" not in vars(once)
    assert once.compute_dtype == "float16"


def test_layers_that_are_alike_are_stressed_once(monkeypatch):
    stressed = []
    monkeypatch.setattr("loops.diagnose.lint.stress.stress", lambda call, limit: stressed.append(call.layer.name) or [])
    keras.utils.set_random_seed(1)
    layers = [L.Dense(32, dtype=HALF, name=f"d{number}") for number in range(4)]
    layers += [L.Dense(32, dtype=HALF, kernel_initializer=keras.initializers.Constant(3.0), name="other")]
    layers += [L.Dense(16, dtype=HALF, name="narrow"), L.Dense(8, dtype="float32")]
    model = keras.Sequential([keras.Input([32]), *layers])
    lint(model, scaled(), MSE, (np.ones([4, 32]), np.ones([4, 8])))
    assert stressed == ["d0", "other", "narrow"]


@keras.saving.register_keras_serializable("lint_cases")
class Inside(L.Layer):
    """Calls a layer inside of a loop, in a function of its own."""

    def __init__(self):
        super().__init__(dtype=HALF)
        self.attention = L.Attention(dtype=HALF, name="attention")

    def call(self, x):
        def loop(x):
            def body(step, h):
                return step + 1, self.attention([h, h])

            return tf.while_loop(lambda step, h: step < 1, body, [0, x])[1]

        return tf.function(loop)(x)


def test_inputs_are_measured_inside_of_loops_and_functions():
    x = np.random.default_rng(0).uniform(-30.0, 30.0, [4, 4, 8]).astype(np.float32)
    x[0, 0, 0] = 30.0
    model = keras.Sequential([keras.Input([4, 8]), Inside(), L.Dense(8, dtype="float32")])
    found = [one for one in lint(model, scaled(), MSE, (x, np.ones([4, 4, 8], "f"))) if "fails" in one.finding]
    assert [one.layer for one in found] == ["attention"]
    assert len(heavy(found)) == 1


def test_a_bound_of_a_normalization_is_that_of_its_outputs():
    x = keras.Input([4, 8])
    model = keras.Model(x, L.Dense(8, dtype="float32")(L.Attention(name="attention", dtype=HALF)([norm(x)] * 2)))
    sample = 1e3 * np.random.default_rng(0).normal(size=[4, 4, 8]), np.ones([4, 4, 8])
    assert heavy(lint(model, scaled(), MSE, sample)) == []


def norm(x):
    return L.LayerNormalization(dtype=HALF)(x)


def contrastive(y, prediction):
    """Of a batch of 16 alone: which example is which."""
    similar = tf.matmul(prediction, prediction, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(16), similar))


@pytest.mark.usefixtures("unstressed")
def test_a_loss_of_one_batch_size_is_traced_with_it():
    assert heavy(lint(small(), scaled(), contrastive, batch())) == []
    (found,) = heavy(lint(small(), keras.optimizers.SGD(), contrastive, batch()))
    assert "are zero in float16" in found.measured


def test_nothing_meets_a_batch_of_another_size():
    met = set()

    def loss(y, prediction):
        met.add(prediction.shape[0])
        return tf.reduce_mean(tf.square(tf.cast(prediction, tf.float32) - y))

    def look(x):
        met.add(x.shape[0])
        return x

    layers = [L.Dense(8, dtype=HALF), L.Lambda(look, output_shape=(8,), dtype=HALF), L.Dense(8, dtype=HALF)]
    model = keras.Sequential([keras.Input([8]), *layers])
    met.clear()
    lint(model, scaled(), loss, batch())
    assert met == {16}


def test_a_layer_of_many_values_that_takes_the_whole_batch_alone_is_stressed_with_it():
    fixed = L.Lambda(lambda x: tf.ensure_shape(x, [16, 4096]) ** 2, output_shape=(4096,), dtype=HALF, name="fixed")
    model = keras.Sequential([keras.Input(batch_shape=[16, 4096]), fixed, L.Dense(8, dtype="float32")])
    (found,) = [one for one in lint(model, scaled(), MSE, (np.ones([16, 4096]), np.ones([16, 8]))) if one.layer]
    assert found.finding.startswith("note: Lambda enlarges its input")


def fails(y, prediction):
    raise KeyError("no such class")


class Fails(L.Layer):
    """Fails on what it is given, not when the model is made."""

    def call(self, x):
        raise AttributeError("no such attribute")

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize(
    ("layers", "loss", "said"),
    [
        ([], fails, "the model or the loss failed on the sample: KeyError: .*no such class"),
        ([Fails()], MSE, "the model or the loss failed on the sample: AttributeError: no such attribute"),
    ],
)
def test_a_model_or_a_loss_that_fails_says_so_in_one_sentence(layers, loss, said):
    model = keras.Sequential([keras.Input([8]), *layers, L.Dense(8, dtype="float32")])
    with pytest.raises(loops.BadBatch, match=said) as caught:
        lint(model, scaled(), loss, batch())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"model": "no"}, scaler.InvalidArgument, r"lint\(model='no'\): expected a keras.Model"),
        ({"optimizer": 3}, scaler.InvalidArgument, r"lint\(optimizer=3\): expected a Keras optimizer"),
        ({"loss": "mse"}, scaler.InvalidArgument, r"lint\(loss='mse'\): expected a function"),
        ({"sample": batch()[0]}, scaler.InvalidArgument, r"expected a batch \(x, y\)"),
        ({"sample": (1, 2, 3, 4)}, scaler.InvalidArgument, "a batch has 4 parts"),
        ({"sample": (np.ones([4, 5]), np.ones([4, 8]))}, loops.BadBatch, "lint: x has shape"),
        ({"sample": (np.ones([16, 8]), np.ones([8, 8]))}, loops.BadBatch, "x holds 16 examples, y holds 8 examples"),
        ({"sample": (np.ones([16, 8]), np.ones([2, 8]))}, loops.BadBatch, "differ in length"),
        ({"sample": (np.ones([0, 8]), np.ones([0, 8]))}, loops.BadBatch, "lint: the sample is empty"),
        ({"sample": ([[1.0] * 8] * 4, [[1.0] * 8] * 4)}, scaler.InvalidArgument, "Python lists .* np.asarray"),
        ({"sample": dataset().take(0)}, loops.OutOfData, "the dataset is empty"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, said):
    given = {"model": small(), "optimizer": scaled(), "loss": MSE, "sample": batch(), **arguments}
    with pytest.raises(error, match=said):
        lint(**given)
