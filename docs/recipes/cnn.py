"""A convolutional network in mixed float16, evaluated, drawn in TensorBoard and profiled while it trains."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
held_out = tf.data.Dataset.from_tensor_slices((digits.test_images, digits.test_labels)).batch(99)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10, dtype="float32"),  # logits in float32
    ]
)
step = hs.TrainStep(model, digits.loss, keras.optimizers.Adam(2e-3))  # scales, since the model computes in float16
evaluate = hs.Evaluate(model, held_out, [keras.metrics.SparseCategoricalAccuracy(name="accuracy")], every=100)
actions = [
    evaluate,
    hs.TensorBoard("run/tensorboard", every=10),  # tensorboard --logdir run/tensorboard
    hs.Profile("run/tensorboard", first=100, steps=20),  # the first calls trace, so they are not typical
]
print(hs.Loop(step, digits.dataset(64, seed=0), steps_per_call=20, actions=actions).run(200))
print(f"{evaluate.results['accuracy']:.1%} of the held-out digits are right")
