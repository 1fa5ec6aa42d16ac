"""Pure float16: every weight in 16 bits, with and without float32 master weights."""

import keras
import matplotlib.figure
import tensorflow as tf
from sklearn.datasets import load_digits

import halfstep as hs

digits = load_digits()
images, labels = digits.data.astype("float32") / 16.0, digits.target.astype("int32")
examples = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
axes = matplotlib.figure.Figure(figsize=(6, 3)).subplots()


def train_in_float16(name, **arguments):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float16")
    last = keras.layers.Activation("linear", dtype="float32")  # the loss is computed in float32
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10), last]
    model = keras.Sequential([keras.Input((64,)), *layers])
    step = hs.TrainStep(model, cross_entropy, keras.optimizers.Adam(3e-3), **arguments)
    train = examples.shuffle(1500, seed=0).repeat().batch(50)  # made again: the same order for all
    losses = []
    hs.Loop(step, train, actions=[lambda visit: losses.extend(visit.outputs["loss"])]).run(300)
    right = tf.reduce_mean(tf.cast(tf.argmax(model(images[1500:]), axis=-1) == digits.target[1500:], tf.float32))
    print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, {right:.0%} of the held-out digits right")
    axes.plot(losses, label=name)


train_in_float16("with masters")
train_in_float16("without masters", allow_16bit_updates=True)
axes.set(xlabel="step", ylabel="loss", yscale="log")
axes.legend()
axes.figure.savefig("float16.svg", bbox_inches="tight")
