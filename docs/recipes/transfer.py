"""Transfer learning in mixed float16: a backbone of keras.applications, first frozen, then unfrozen."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
images = np.tile(digits.images.repeat(4, 1).repeat(4, 2), 3) * 2.0 - 1.0  # 32 by 32 pixels, of 3 colours
held_out = np.tile(digits.test_images.repeat(4, 1).repeat(4, 2), 3) * 2.0 - 1.0
examples = tf.data.Dataset.from_tensor_slices((images, digits.labels)).shuffle(1438, seed=0).repeat().batch(32)

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


def train(phase, learning_rate):
    """Makes all that belongs to one set of trainable variables: masters, optimizer, compiled functions, loss scaler."""
    step = hs.TrainStep(model, digits.loss, keras.optimizers.Adam(learning_rate))
    loop = hs.Loop(step, examples, steps_per_call=10)
    loop.run(60)
    right = np.mean(np.argmax(model(held_out, training=False), axis=-1) == digits.test_labels)
    print(f"{phase}: {len(model.trainable_variables)} variables trained, {right:.0%} of the held-out digits right")
    return loop


backbone.trainable = False
loop = train("frozen", 1e-3)
backbone.trainable = True
try:
    loop.run(70)
except hs.InvalidArgument as error:
    print(error)
train("unfrozen", 1e-4)
