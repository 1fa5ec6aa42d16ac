"""A loop from PyTorch's guide to automatic mixed precision, ported. The lines on the right were there before."""

import keras
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")  # with torch.autocast("cuda", torch.float16):
digits = hs.loops.tasks.load("digits")
hidden = [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
net = keras.Sequential([keras.Input([8, 8, 1]), *hidden, keras.layers.Dense(10, dtype="float32")])
cosine = keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=4 * 22)  # CosineAnnealingLR(optimizer, T_max=4 * 22)
optimizer = keras.optimizers.AdamW(cosine, weight_decay=0.01)  # torch.optim.AdamW(net.parameters(), 1e-2)
loss_scaler = hs.LossScaler(hs.presets.pytorch())  # scaler = torch.amp.GradScaler("cuda")
checkpoint = tf.train.Checkpoint(net=net, optimizer=optimizer, scaler=loss_scaler)


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:  # optimizer.zero_grad()
        outputs = net(inputs, training=True)  # outputs = net(inputs)
        loss = digits.loss(targets, outputs)  # loss = loss_fn(outputs, targets)
        scaled = loss_scaler.scale(loss)  # scaler.scale(loss)
    gradients = tape.gradient(scaled, net.trainable_variables)  # .backward()
    # scaler.unscale_(optimizer); clip_grad_norm_(net.parameters(), 1.0); scaler.step(optimizer); scaler.update()
    loss_scaler.apply(optimizer, gradients, net.trainable_variables, clip_norm=1.0)
    return loss


data = tf.data.Dataset.from_tensor_slices((digits.images, digits.labels)).shuffle(1438, seed=0)
for epoch in range(4):
    for inputs, targets in data.batch(64, drop_remainder=True):
        loss = train_step(inputs, targets)
    loss_scaler.check()  # GradScaler never says that a run is stuck
    print(f"epoch {epoch}: loss {float(loss):.2f}, scale {loss_scaler.loss_scale:.0f}")  # scaler.get_scale()

path = checkpoint.write("amp")  # torch.save({"net": net.state_dict(), ..., "scaler": scaler.state_dict()}, "amp.pt")
checkpoint.read(path).assert_consumed()  # scaler.load_state_dict(...)
print(f"accuracy {digits.accuracy(net):.1%}, skipped {loss_scaler.counters.skipped}")
