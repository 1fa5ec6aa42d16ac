"""Reinforcement learning: actor and critic on a cart with a pole, in float16, without a dataset."""

import keras
import numpy as np
import tensorflow as tf

import loops

CARTS, LONGEST = 32, 100
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)


def move(state, action):
    """Gymnasium's CartPole-v1 for many carts: position, speed, angle and turning speed [carts, 4] after 0.02 s."""
    x, v, angle, turning = state.T
    force = np.where(action == 1, 10.0, -10.0) + 0.05 * turning**2 * np.sin(angle)
    turned = (9.8 * np.sin(angle) - np.cos(angle) * force / 1.1) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    pushed = force / 1.1 - 0.05 * turned * np.cos(angle) / 1.1
    return np.stack([x + 0.02 * v, v + 0.02 * pushed, angle + 0.02 * turning, turning + 0.02 * turned], axis=1)


def play():
    """States [steps, carts, 4], actions, and which carts still stood [steps, carts]."""
    state, stands, steps = random.uniform(-0.05, 0.05, [CARTS, 4]), np.ones(CARTS, bool), []
    for _ in range(LONGEST):
        action = random.uniform(size=CARTS) < policy(tf.constant(state, tf.float32)).numpy()
        steps.append((np.float32(state), np.int32(action), stands))
        state = move(state, action)
        stands = stands & (np.abs(state[:, 0]) < 2.4) & (np.abs(state[:, 2]) < 0.2095)
    return map(np.stack, zip(*steps, strict=True))


keras.config.set_dtype_policy("float16")
Input, Dense = keras.Input, keras.layers.Dense
actor, critic = (keras.Sequential([Input([4]), Dense(32, "tanh"), Dense(n, dtype="float32")]) for n in (2, 1))
policy = tf.function(lambda state: tf.nn.softmax(actor(state))[:, 1])


def losses(batch):
    states, actions, returns, stood = batch
    wrong = (returns - critic(states)[:, 0]) * stood
    unlikely = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, actor(states))
    return tf.reduce_mean(tf.stop_gradient(wrong) * unlikely), tf.reduce_mean(tf.square(wrong))


actor_part = loops.Part("actor", actor, lambda both: both[0], keras.optimizers.Adam(0.02))
critic_part = loops.Part("critic", critic, lambda both: both[1], keras.optimizers.Adam(0.02))
step = loops.ComposedStep([actor_part, critic_part], losses)
train_step = tf.function(step)
for update in range(1, 31):
    states, actions, stood = play()
    returns = np.cumsum(stood[::-1], axis=0)[::-1] * stood  # how long each cart stands from here
    returns = np.float32((returns - returns[stood].mean()) / returns[stood].std())
    train_step((states.reshape(-1, 4), actions.reshape(-1), returns.reshape(-1), np.float32(stood).reshape(-1)))
    step.check()  # no Loop does it here
    if update in (1, 10, 20, 30):
        print(f"update {update}: the poles stand for {stood.sum(axis=0).mean():.0f} of {LONGEST} steps")
print(f"more than 90 in the end: {stood.sum(axis=0).mean() > 90}")
