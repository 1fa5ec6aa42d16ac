"""One program for several devices of one machine, and for several machines."""

import os

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

if "TF_CONFIG" in os.environ:  # this process is one of several workers
    strategy = hs.join_workers(seconds=120)
else:  # two CPU devices stand for two GPUs; with GPUs it is tf.distribute.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
images, labels = digits.images[:1408].copy(), digits.labels[:1408]
images[60] = np.inf  # in the first batch of 64, and there in the second replica's half
# 22 global batches of 64, of which each replica takes half.
train = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(64, drop_remainder=True)
hidden = [keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.BatchNormalization()]
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
with strategy.scope():  # all variables are made in here, the loop is made outside
    model = keras.Sequential([keras.Input((8, 8, 1)), *hidden, keras.layers.Dense(10, dtype="float32")])
    step = hs.TrainStep(model, cross_entropy, keras.optimizers.Adam(2e-3))
losses = []
watch = hs.Call(lambda visit: losses.append(np.nanmean(visit.outputs["loss"])), every=22)
counters = hs.Loop(step, train, steps_per_call=22, strategy=strategy, actions=[watch]).run(88)
print(f"{strategy.num_replicas_in_sync} replicas: {counters.applied} steps applied, {counters.skipped} skipped")
print("mean loss of each epoch:", " ".join(f"{loss:.2f}" for loss in losses))
print(step.loss_scaler.explain())
