"""Balance two losses by the norms of their gradients (GradNorm), in mixed float16."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
inputs = keras.Input([8, 8, 1])
shared = keras.layers.Dense(64, "relu")
body = shared(keras.layers.Flatten()(inputs))
model = keras.Model(inputs, [keras.layers.Dense(units, dtype="float32")(body) for units in (10, 1)])
optimizer, loss_scaler = keras.optimizers.Adam(1e-3), hs.LossScaler()
balance, first = tf.Variable([1.0, 1.0]), tf.Variable([0.0, 0.0])  # weights of the losses; the losses at the first step


def train_step(batch):
    x, y = batch
    with tf.GradientTape(persistent=True) as tape:
        logits, odd = model(x, training=True)
        each = digits.loss(y, logits), 30.0 * tf.reduce_mean(tf.square(odd[:, 0] - tf.cast(y % 2, tf.float32)))
        losses = tf.stack(each)
        scaled = [loss_scaler.scale(loss) for loss in each]
        total = loss_scaler.scale(tf.reduce_sum(balance * losses))
    # The norm of each loss's gradient where both meet, of the loss and not of the scaled one.
    grads = [loss_scaler.unscale([tape.gradient(one, shared.kernel)])[0] for one in scaled]
    norms = tf.stack([tf.norm(grad) for grad in grads])
    outcome = loss_scaler.apply(optimizer, tape.gradient(total, model.trainable_variables), model.trainable_variables)
    if outcome.finite:  # a skipped step moves the balance no more than the weights
        first.assign(tf.where(first > 0.0, first, losses))
        speed = losses / first
        wanted = tf.reduce_mean(balance * norms) * tf.sqrt(speed / tf.reduce_mean(speed))
        moved = balance - 0.02 * tf.sign(balance * norms - wanted)  # the sign of GradNorm's gradient
        balance.assign(2.0 * tf.maximum(moved, 0.01) / tf.reduce_sum(tf.maximum(moved, 0.01)))
    return {"loss": tf.reduce_sum(losses), "applied": outcome.finite}


print(hs.Loop(train_step, digits.dataset(64, seed=0), steps_per_call=50).run(200))
print("balance", [round(float(one), 1) for one in balance.numpy()])
