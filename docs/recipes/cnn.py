"""A convolutional network in mixed float16, evaluated, drawn in TensorBoard and profiled while it trains."""

import pathlib

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import loops
import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16.0, digits.target.astype("int32")
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shuffle(1500, seed=0).repeat().batch(64)
held_out = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:])).batch(99)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.ReLU(),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10, dtype="float32"),  # logits in float32
    ]
)
step = loops.TrainStep(
    model,
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    keras.optimizers.Adam(2e-3),
    loss_scaler=scaler.LossScaler(scaler.Dynamic()),
)
evaluate = loops.Evaluate(model, held_out, [keras.metrics.SparseCategoricalAccuracy(name="accuracy")], every=100)
actions = [
    evaluate,
    loops.TensorBoard("run/tensorboard", every=10),  # tensorboard --logdir run/tensorboard
    loops.Profile("run/tensorboard", first=100, steps=20),  # the first calls trace, so they are not typical
]
loop = loops.Loop(step, train, steps_per_call=20, actions=actions)
print(loop.run(200))
print(f"{evaluate.results['accuracy']:.1%} of the held-out digits are right")
for pattern in ("events.out.*", "*.xplane.pb"):
    print(pattern, "written:", any(pathlib.Path("run/tensorboard").rglob(pattern)))
