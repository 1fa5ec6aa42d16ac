"""bfloat16: the same loop, without a loss scale."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import loops
import scaler

digits = load_digits()
images, labels = digits.data.astype("float32") / 16.0, digits.target.astype("int32")
examples = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_in(policy, strategy):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, dtype="float32")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = keras.optimizers.Adam(2e-3, epsilon=1e-12)  # far below the small gradients
    loss_scaler = scaler.LossScaler(strategy)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            # One in a million, as the weight of a small term in a sum of losses may be.
            loss = 1e-6 * cross_entropy(y, model(x, training=True))
            scaled = loss_scaler.scale(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        outcome = loss_scaler.apply(optimizer, grads, model.trainable_variables)
        return {"loss": loss, "applied": outcome.finite}

    train = examples.shuffle(1500, seed=0).repeat().batch(50)  # made anew: the same order for all
    loop = loops.Loop(train_step, train, steps_per_call=50)
    loop.run(200)
    right = tf.reduce_mean(tf.cast(tf.argmax(model(images[1500:]), axis=-1) == digits.target[1500:], tf.float32))
    print(f"{policy:14} {type(strategy).__name__:9} {right:.0%} right, {loop.counters.skipped} steps skipped")


train_in("mixed_bfloat16", scaler.NoScaling())
train_in("mixed_float16", scaler.NoScaling())
train_in("mixed_float16", scaler.Dynamic())
