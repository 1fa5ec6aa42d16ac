"""bfloat16: the same loop, without a loss scale."""

import keras
import tensorflow as tf

import halfstep as hs

digits = hs.loops.tasks.load("digits")


def train_in(policy, strategy):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    hidden = [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
    model = keras.Sequential([keras.Input((8, 8, 1)), *hidden, keras.layers.Dense(10, dtype="float32")])
    optimizer = keras.optimizers.Adam(2e-3, epsilon=1e-12)  # far below the small gradients
    loss_scaler = hs.LossScaler(strategy)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            # One in a million, as the weight of a small term in a sum of losses may be.
            loss = 1e-6 * digits.loss(y, model(x, training=True))
            scaled = loss_scaler.scale(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        outcome = loss_scaler.apply(optimizer, grads, model.trainable_variables)
        return {"loss": loss, "applied": outcome.finite}

    counters = hs.Loop(train_step, digits.dataset(50, seed=0), steps_per_call=50).run(200)
    name, right = type(strategy).__name__, digits.accuracy(model)
    print(f"{policy:14} {name:9} {right:.0%} right, {counters.skipped} steps skipped")


train_in("mixed_bfloat16", hs.NoScaling())
train_in("mixed_float16", hs.NoScaling())
train_in("mixed_float16", hs.Dynamic())
