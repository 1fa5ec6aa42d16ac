"""Pure float16: every weight in 16 bits, with and without float32 master weights."""

import keras
import matplotlib
import matplotlib.figure
import tensorflow as tf
from sklearn.datasets import load_digits

import loops

matplotlib.use("Agg")  # no window
digits = load_digits()
images, labels = digits.data.astype("float32") / 16.0, digits.target.astype("int32")
examples = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))


class Losses:
    """An action: it keeps the loss of every step."""

    def __init__(self):
        self.values = []

    def __call__(self, visit):
        self.values.extend(visit.outputs["loss"])


def train_in_float16(**arguments):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float16")
    layers = [
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
        keras.layers.Activation("linear", dtype="float32"),  # the loss is computed in float32
    ]
    model = keras.Sequential([keras.Input((64,)), *layers])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = loops.TrainStep(model, cross_entropy, keras.optimizers.Adam(3e-3), **arguments)
    train = examples.shuffle(1500, seed=0).repeat().batch(50)  # made anew: the same order for all
    losses = Losses()
    loops.Loop(step, train, steps_per_call=100, actions=[losses]).run(300)
    right = tf.reduce_mean(tf.cast(tf.argmax(model(images[1500:]), axis=-1) == digits.target[1500:], tf.float32))
    return losses.values, right


runs = {"with masters": train_in_float16(), "without masters": train_in_float16(allow_16bit_updates=True)}
axes = matplotlib.figure.Figure(figsize=(6, 3)).subplots()
for name, (losses, right) in runs.items():
    print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, {right:.0%} of the held-out digits right")
    axes.plot(losses, label=name)
axes.set(xlabel="step", ylabel="loss", yscale="log")
axes.legend()
axes.figure.savefig("float16.svg", bbox_inches="tight")
