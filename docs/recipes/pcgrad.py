"""Two tasks whose gradients are freed of what works against the other (PCGrad), in mixed float16."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
inputs = keras.Input([8, 8, 1])
body = keras.layers.Dense(64, "relu")(keras.layers.Flatten()(inputs))
model = keras.Model(inputs, [keras.layers.Dense(units, dtype="float32")(body) for units in (10, 1)])
weights, optimizer, loss_scaler = model.trainable_variables, keras.optimizers.Adam(1e-3), hs.LossScaler()


def without_conflict(grads, others):  # None where a task does not reach a weight
    grads, others = (
        [tf.zeros_like(weight) if grad is None else grad for weight, grad in zip(weights, own, strict=True)]
        for own in (grads, others)
    )
    product = tf.add_n([tf.reduce_sum(one * other) for one, other in zip(grads, others, strict=True)])
    share = tf.minimum(tf.math.divide_no_nan(product, tf.square(tf.linalg.global_norm(others))), 0.0)
    return [one - share * other for one, other in zip(grads, others, strict=True)]


def train_step(batch):
    x, y = batch
    with tf.GradientTape(persistent=True) as tape:
        logits, odd = model(x, training=True)
        losses = digits.loss(y, logits), tf.reduce_mean(tf.square(odd[:, 0] - tf.cast(y % 2, tf.float32)))
        scaled = [loss_scaler.scale(loss) for loss in losses]
    first, second = (loss_scaler.unscale(tape.gradient(one, weights)) for one in scaled)  # projected unscaled
    pairs = zip(without_conflict(first, second), without_conflict(second, first), strict=True)
    outcome = loss_scaler.apply(optimizer, [one + other for one, other in pairs], weights, unscaled=True)
    return {"loss": losses[0] + losses[1], "applied": outcome.finite}


print(hs.Loop(train_step, digits.dataset(64, seed=0), steps_per_call=50).run(200))
accuracy = keras.metrics.sparse_categorical_accuracy(digits.test_labels, model(digits.test_images)[0])
print(f"accuracy {float(tf.reduce_mean(accuracy)):.1%}")
