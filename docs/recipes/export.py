"""Export a float16 model that was trained with float32 masters, and check the files in a new process."""

import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import halfstep as hs

digits = load_digits()
images, labels = digits.data.astype("float32") / 16.0, digits.target.astype("int32")


def make_model(policy):
    keras.config.set_dtype_policy(policy)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Activation("softmax", dtype="float32")])
    keras.config.set_dtype_policy("float32")
    return model


keras.utils.set_random_seed(0)
model = make_model("float16")
loss = keras.losses.SparseCategoricalCrossentropy()
step = hs.TrainStep(model, loss, keras.optimizers.Adam(3e-3))
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shuffle(1500, seed=0).repeat().batch(50)
hs.Loop(step, train).run(300)

# The model that was trained: each weight is its master, rounded to float16.
model.export("served_float16", verbose=False)
model.save("model_float16.keras")

# The masters themselves, in a float32 model, for a server or a converter without float16.
wide = make_model("float32")
for variable, master in zip(wide.trainable_variables, step.masters.weights, strict=True):
    variable.assign(master)
for variable, trained in zip(wide.non_trainable_variables, model.non_trainable_variables, strict=True):
    variable.assign(tf.cast(trained, variable.dtype))  # BatchNorm's statistics
wide.export("served_float32", verbose=False)

load = """import keras, numpy, sys, tensorflow as tf
for name in sys.argv[1:]:
    kept = keras.models.load_model(name) if name.endswith(".keras") else tf.saved_model.load(name)
    predict = getattr(kept, "serve", kept)
    numpy.save(f"{name}.npy", predict(numpy.load("x.npy")))"""
np.save("x.npy", images[1500:])
limits = {"served_float16": 1e-3, "model_float16.keras": 1e-3, "served_float32": 2e-2}
subprocess.run([sys.executable, "-c", load, *limits], check=True)
here = model(images[1500:]).numpy()
for name, limit in limits.items():
    there = np.load(f"{name}.npy")
    right = np.mean(there.argmax(axis=1) == labels[1500:])
    print(f"{name}: {right:.0%} right, outputs within {limit}: {np.abs(there - here).max() <= limit}")
