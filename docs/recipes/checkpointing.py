"""Gradient checkpointing: the backward pass computes activations again instead of keeping them."""

import keras
import tensorflow as tf

import loops

BATCH = 256
x = tf.random.stateless_normal([2048, 64], seed=(0, 1))
y = tf.cast(x[:, 0] * x[:, 1] > 0, tf.int32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2048, seed=0).repeat().batch(BATCH)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Recomputed(keras.layers.Wrapper):
    """Calls the layer that it wraps, keeps only its input, and calls it again in the backward pass."""

    def call(self, inputs):
        return tf.recompute_grad(self.layer)(inputs)


def make_model(wrap):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input([64])
    for _ in range(3):
        layers = [keras.layers.LayerNormalization(), keras.layers.Dense(256, activation="gelu"), keras.layers.Dense(64)]
        x = keras.layers.Add()([x, wrap(keras.Sequential(layers))(x)])
    return keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(x))


def kept(model):
    """The bytes of all tensors that the forward pass makes and the backward pass reads."""
    forward = []

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x, training=True))
        forward.extend(loss.graph.get_operations())
        return tape.gradient(loss, model.trainable_variables)

    operations = gradients.get_concrete_function(x[:BATCH], y[:BATCH]).graph.get_operations()
    read = {tensor.ref() for operation in operations[len(forward) :] for tensor in operation.inputs}
    crossing = [ref.deref() for ref in read if ref.deref().op in forward]
    return sum(tensor.dtype.size * tensor.shape.num_elements() for tensor in crossing)


for policy in ("float32", "mixed_float16"):
    keras.config.set_dtype_policy(policy)
    plain, recomputed = kept(make_model(lambda block: block)), kept(make_model(Recomputed))
    print(f"{policy}: {plain / 1e6:.1f} MB are kept, with recomputation {recomputed / 1e6:.1f} MB")

step = loops.TrainStep(make_model(Recomputed), cross_entropy, keras.optimizers.Adam(1e-3))
visits = []
counters = loops.Loop(step, dataset, steps_per_call=50, actions=[visits.append]).run(100)
print(f"loss {visits[0].outputs['loss'][0]:.2f} -> {visits[-1].outputs['loss'][-1]:.2f}, skipped {counters.skipped}")
