"""Quantisation-aware fine-tuning: kernels of two bits by fake quantisation, and float8 by Keras."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")


class Rounded(keras.layers.Dense):
    """A Dense layer that multiplies by a rounded kernel. The gradient passes the rounding by, to the kernel itself."""

    def call(self, inputs):
        kernel = tf.cast(self.kernel, tf.float32)  # the operation takes nothing else
        largest = tf.stop_gradient(tf.reduce_max(tf.abs(kernel)))
        kernel = tf.quantization.fake_quant_with_min_max_vars(kernel, -largest, largest, num_bits=2)
        return self.activation(tf.matmul(inputs, tf.cast(kernel, self.compute_dtype)) + self.bias)


def make_model(dense):
    hidden = [keras.layers.Flatten(), dense(64, activation="relu"), dense(64, activation="relu")]
    return keras.Sequential([keras.Input([8, 8, 1]), *hidden, keras.layers.Dense(10, dtype="float32")])


def train(model, steps):
    # The optimizer is new: after `quantize` it has other variables to move.
    step = hs.TrainStep(model, digits.loss, keras.optimizers.Adam(1e-3))
    return hs.Loop(step, digits.dataset(64, seed=0), steps_per_call=100).run(steps).skipped


model, rounded = make_model(keras.layers.Dense), make_model(Rounded)
train(model, 400)
rounded.set_weights(model.get_weights())
print(f"float16: {digits.accuracy(model):.1%}, 2 bits: {digits.accuracy(rounded):.1%}", end="")
train(rounded, 300)
print(f", fine-tuned {digits.accuracy(rounded):.1%}")
for layer in model.layers[1:3]:
    layer.quantize("float8")
skipped = train(model, 100)
print(f"float8: fine-tuned {digits.accuracy(model):.1%}, skipped {skipped}")
history = model.layers[1].outputs_grad_amax_history
print(f"largest scaled gradient in its history of {history.shape[0]} steps: {float(tf.reduce_max(history)):.0f}")
