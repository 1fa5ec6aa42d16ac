"""Guards that a trace holds the largest gradient that a strategy sees, also of an embedding, or says that not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import plain_model, squared_error

import loops
import scaler
from loops.record.trace.tensors import lacks_of, tensors_of

pytestmark = pytest.mark.slow


def embedded():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(5, 4, name="words", dtype="mixed_float16"), keras.layers.Flatten()]
    return keras.Sequential([keras.Input([6], dtype="int32"), *layers, keras.layers.Dense(1, dtype="float32")])


def test_the_values_of_an_index_are_summed():
    model, ids, target = embedded(), tf.constant([[1, 1, 1, 1, 2, 2]] * 8), tf.ones([8, 1])
    with tf.GradientTape() as tape:
        loss = squared_error(target, model(ids))
    dense = tf.convert_to_tensor(tape.gradient(loss, model.trainable_variables)[0])
    step = loops.TrainStep(
        model,
        squared_error,
        keras.optimizers.SGD(0.0),
        loss_scaler=scaler.LossScaler(scaler.Static(2.0**8)),
        probes=scaler.observe.watch(model),
    )
    outputs = tf.function(step)((ids, target))
    name = "weight_gradients/words/embeddings"
    row = step.probes.names.index(name)
    assert outputs["amax"][row].numpy() / 2.0**8 == pytest.approx(np.abs(dense).max(), rel=1e-2)
    # The counts are those of the values as they come.
    assert outputs["counts"].numpy()[row].sum() == 8 * 6 * 4
    (tensor,) = [one for one in tensors_of(step) if one.name == name]
    assert (tensor.format, tensor.certain) == ("float32", True)
    alone = loops.TrainStep(
        model, squared_error, keras.optimizers.SGD(0.0), probes=scaler.observe.watch(model, kinds=["weight_gradients"])
    )
    tf.function(alone)((ids, target))
    (tensor, *_) = [one for one in tensors_of(alone) if one.name == name]
    assert (tensor.format, tensor.certain) == ("float16", False)


def test_what_the_largest_gradient_is_not_in():
    def step(model, watched=None, **arguments):
        probes = scaler.observe.watch(model) if watched is None else scaler.observe.watch(model, **watched)
        return loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.0), probes=probes, **arguments)

    model = plain_model()
    assert lacks_of(step(model), 1) == []
    assert lacks_of(step(model), 2) == ["replicas"]
    assert lacks_of(step(model, accumulate=2), 1) == ["micro-batches"]
    assert lacks_of(step(model, {"kinds": ["activations"]}), 1) == ["weights"]
    assert lacks_of(step(model, {"layers": [model.layers[0].name]}), 1) == ["weights"]
