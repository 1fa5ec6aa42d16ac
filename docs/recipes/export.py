"""Export a float16 model that was trained with float32 masters, and check the files in a new process."""

import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
digits = hs.loops.tasks.load("digits")


def make_model(dtype):
    layers = [keras.layers.Dense(64, "relu", dtype=dtype), keras.layers.BatchNormalization(dtype=dtype)]
    flat = [keras.Input([8, 8, 1]), keras.layers.Flatten(), *layers, keras.layers.Dense(10, dtype=dtype)]
    return keras.Sequential([*flat, keras.layers.Activation("softmax", dtype="float32")])


model = make_model("float16")
step = hs.TrainStep(model, keras.losses.SparseCategoricalCrossentropy(), keras.optimizers.Adam(3e-3))
hs.Loop(step, digits.dataset(50, seed=0)).run(150)

# The model that was trained: each weight is its master, rounded to float16.
model.export("served_float16", verbose=False)
model.save("model_float16.keras")

# The masters themselves, in a float32 model, for a server or a converter without float16.
wide = make_model("float32")
others = [tf.cast(one, tf.float32) for one in model.non_trainable_variables]  # BatchNorm's statistics
for variable, value in zip(wide.trainable_variables, step.masters.weights, strict=True):
    variable.assign(value)
for variable, value in zip(wide.non_trainable_variables, others, strict=True):
    variable.assign(value)
wide.export("served_float32", verbose=False)

load = """import keras, numpy, sys, tensorflow as tf
for name in sys.argv[1:]:
    kept = keras.models.load_model(name) if name.endswith(".keras") else tf.saved_model.load(name)
    numpy.save(f"{name}.npy", getattr(kept, "serve", kept)(numpy.load("x.npy")))"""
np.save("x.npy", digits.test_images)
limits = {"served_float16": 1e-3, "model_float16.keras": 1e-3, "served_float32": 2e-2}
subprocess.run([sys.executable, "-c", load, *limits], check=True)
for name, limit in limits.items():
    there, here = np.load(f"{name}.npy"), model(digits.test_images).numpy()
    right = np.mean(there.argmax(axis=1) == digits.test_labels)
    print(f"{name}: {right:.0%} right, outputs within {limit}: {np.abs(there - here).max() <= limit}")
