"""A custom loop of tf.keras 2 with mixed precision, ported: what Keras 3 took out is still there."""

import keras  # from tensorflow import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.mixed_precision.set_global_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
hidden = [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
model = keras.Sequential([keras.Input([8, 8, 1]), *hidden, keras.layers.Dense(10, dtype="float32")])
loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(1e-2)
optimizer = hs.LossScaleOptimizer(optimizer)  # keras.mixed_precision.LossScaleOptimizer(optimizer)
data = tf.data.Dataset.from_tensor_slices((digits.images, digits.labels)).shuffle(1438, seed=0).batch(64)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
        scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


for epoch in range(3):
    for x, y in data:
        train_step(x, y)
    optimizer.loss_scaler.check()  # tf.keras stays at a scale of 1 without a word
    print(f"epoch {epoch}: accuracy {digits.accuracy(model):.1%}, scale {float(optimizer.loss_scale):.0f}")

# What a train step above spells out, `compile` and `fit` do too.
model.compile(optimizer, loss_object, metrics=["accuracy"])
hs.protect(model)  # a skipped step also puts back BatchNorm, seed generators and metrics
history = model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[hs.LossScaleLogger()]).history
print(f"fit: accuracy {history['accuracy'][0]:.2f}, skipped {history['skipped_steps'][0]}")
