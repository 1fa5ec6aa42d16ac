"""Guards the loss scaler that a `TrainStep` takes when it is given none: one that scales where float16 needs it."""

import warnings

import keras
import pytest
import tensorflow as tf
from loop_cases import static
from models import squared_error

import loops
import scaler

SGD = keras.optimizers.SGD


def sequential(*kinds):
    dense = [keras.layers.Dense(4, dtype=kind, name=f"dense_{place}") for place, kind in enumerate(kinds)]
    return keras.Sequential([keras.Input([4]), *dense])


class Late(keras.Model):
    """Makes its layer when it is built, and not before."""

    def __init__(self, kind):
        super().__init__(dtype="float32")
        self.kind = kind

    def build(self, shape):
        self.dense = keras.layers.Dense(1, dtype=self.kind)
        self.dense.build(shape)

    def call(self, x):
        return tf.cast(self.dense(x), tf.float32)


def nested():
    return keras.Sequential([keras.Input([4]), sequential("float32", "mixed_float16"), keras.layers.Dense(4)])


def of(model, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return loops.TrainStep(model, squared_error, SGD(0.1), **arguments).loss_scaler.strategy


SCALED = [
    lambda: sequential("mixed_float16"),
    lambda: sequential("float16"),
    lambda: sequential("float32", "float16", "float32"),
    lambda: sequential("bfloat16", "mixed_float16"),
    nested,
    lambda: keras.Sequential([keras.layers.Dense(4, dtype="mixed_float16")]),
]
NOT_SCALED = [
    lambda: sequential("float32", "mixed_bfloat16"),
    lambda: sequential("bfloat16"),
    lambda: sequential("float64"),
    lambda: keras.Sequential([keras.layers.Dense(4)]),
]


@pytest.mark.parametrize(
    ("make", "strategy"),
    [*((make, scaler.Dynamic()) for make in SCALED), *((make, scaler.NoScaling()) for make in NOT_SCALED)],
)
def test_a_model_that_computes_in_float16_is_scaled_and_any_other_is_not(make, strategy):
    assert of(make()) == strategy


def test_what_was_asked_for_is_taken():
    assert of(sequential("float16"), loss_scaler=scaler.LossScaler(scaler.NoScaling())) == scaler.NoScaling()
    assert of(sequential("float32"), loss_scaler=static(8.0)) == scaler.Static(8.0)


def test_a_layerwise_scales_by_itself():
    model, layerwise = scaler.layerwise.insert_rescales(sequential("float16", "float16"), after=["dense_0"])
    assert of(model, layerwise=layerwise) == scaler.NoScaling()


@pytest.mark.slow_with("float16")
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_small_losses_train(policy):
    model = sequential(policy)
    step = loops.TrainStep(model, lambda y, prediction: 1e-8 * squared_error(y, prediction), SGD(1e7))
    before = model.trainable_variables[0].numpy()
    assert all(step((tf.eye(4), tf.zeros([4, 4])))["applied"] for _ in range(4))
    assert abs(model.trainable_variables[0].numpy() - before).max() > 0.02


def test_layers_made_late_are_not_overlooked():
    pair = tf.ones([2, 4]), tf.ones([2, 1])
    assert "loss" in loops.TrainStep(Late("float32"), squared_error, SGD())(pair)
    step = loops.TrainStep(Late("mixed_float16"), squared_error, SGD())
    with pytest.raises(scaler.InvalidArgument, match=r"computes in float16.*pass loss_scaler="):
        step(pair)
    built = Late("mixed_float16")
    built(pair[0])
    assert of(built) == scaler.Dynamic()
    assert "loss" in loops.TrainStep(Late("mixed_float16"), squared_error, SGD(), loss_scaler=scaler.LossScaler())(pair)


def test_a_composed_step_scales_by_itself_where_one_of_its_models_computes_in_float16():
    def scales(**kinds):
        parts = []
        for name, kind in kinds.items():
            model = sequential(kind)
            parts.append(loops.Part(name, model, lambda x, model=model: tf.reduce_mean(model(x)), SGD()))
        return {name: float(one.loss_scale) for name, one in loops.ComposedStep(parts).scalers.items()}

    assert scales(half="mixed_float16", full="float32") == {"half": 2.0**15, "full": 2.0**15}
    assert scales(full="float32") == {"full": 1.0}
