"""Two optimizers behind one scaler, ported from tf.keras 2: both move, or none does."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
body = keras.Sequential([keras.Input([8, 8, 1]), keras.layers.Flatten(), keras.layers.Dense(64, "relu")])
head = keras.Sequential([keras.Input([64]), keras.layers.Dense(10, dtype="float32")])
of_body, of_head = keras.optimizers.Adam(1e-3), keras.optimizers.SGD(0.1)
loss_scaler = hs.LossScaler()  # of_body = LossScaleOptimizer(of_body)


def train_step(batch):
    with tf.GradientTape() as tape:
        loss = digits.loss(batch[1], head(body(batch[0], training=True)))
        scaled = loss_scaler.scale(loss)  # of_body.get_scaled_loss(loss)
    grads = tape.gradient(scaled, [body.trainable_variables, head.trainable_variables])
    shares = [  # grads = of_body.get_unscaled_gradients(grads)
        hs.Share(of_body, grads[0], body.trainable_variables),  # of_body.apply_gradients(zip(...))
        hs.Share(of_head, grads[1], head.trainable_variables),  # of_head.apply_gradients(zip(...))
    ]
    outcome, _ = hs.apply_together(loss_scaler, shares)
    return {"loss": loss, "applied": outcome.finite}


print(hs.Loop(train_step, digits.dataset(64, seed=0), steps_per_call=50).run(200))
print(f"accuracy {digits.accuracy(keras.Sequential([body, head])):.1%}")

images, labels = next(iter(digits.dataset(64, seed=1)))
applied = train_step((images * 1e30, labels))["applied"]  # infinite in float16
print("applied", bool(applied), "iterations", int(of_body.iterations), int(of_head.iterations))
