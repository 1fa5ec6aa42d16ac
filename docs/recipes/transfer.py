"""Transfer learning in mixed float16: a backbone of keras.applications, first frozen, then unfrozen."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import loops
import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
images = digits.images.repeat(4, axis=1).repeat(4, axis=2)[..., None].repeat(3, axis=3).astype("float32") / 8.0 - 1.0
labels = digits.target.astype("int32")
examples = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))

# Yours has weights="imagenet", and all of its layers. Here nothing is downloaded: the weights are random, a few forward
# passes give BatchNorm its statistics, and two blocks are enough for digits.
whole = keras.applications.MobileNet((32, 32, 3), alpha=0.5, include_top=False, weights=None)
backbone = keras.Model(whole.input, whole.get_layer("conv_pw_2_relu").output)
for layer in backbone.layers:
    layer.momentum = 0.5
for _ in range(8):
    backbone(images[:256], training=True)

inputs = keras.Input((32, 32, 3))
features = backbone(inputs, training=False)  # BatchNorm keeps its statistics, also when its weights are trained
model = keras.Model(inputs, keras.layers.Dense(10, dtype="float32")(keras.layers.Flatten()(features)))
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_loop(learning_rate):
    """All that belongs to one set of trainable variables: masters, optimizer, compiled functions, loss scaler."""
    step = loops.TrainStep(
        model, cross_entropy, keras.optimizers.Adam(learning_rate), loss_scaler=scaler.LossScaler(scaler.Dynamic())
    )
    return loops.Loop(step, examples.shuffle(1500, seed=0).repeat().batch(32), steps_per_call=10)


def report(phase):
    right = np.mean(np.argmax(model(images[1500:], training=False), axis=-1) == labels[1500:])
    print(f"{phase}: {len(model.trainable_variables)} variables trained, {right:.0%} of the held-out digits right")


backbone.trainable = False
frozen = make_loop(1e-3)
frozen.run(60)
report("frozen")

backbone.trainable = True
try:
    frozen.run(70)
except scaler.InvalidArgument as error:
    print(error)
make_loop(1e-4).run(60)
report("unfrozen")
