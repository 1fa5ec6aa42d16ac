"""Reinforcement learning: actor and critic balance a pole, in float16, without a dataset."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("float16")
random, Dense = np.random.default_rng(0), keras.layers.Dense
actor, critic = (keras.Sequential([keras.Input([2]), Dense(32, "tanh"), Dense(n, dtype="float32")]) for n in (2, 1))
policy = tf.function(lambda state: tf.nn.softmax(actor(state))[:, 1])


def play():
    """States of 32 poles, actions, and which poles still stood, each [100 steps, 32, ...]."""
    state, stands, steps = random.uniform(-0.05, 0.05, [32, 2]), np.ones(32, bool), []
    for _ in range(100):
        action = random.uniform(size=32) < policy(tf.constant(state, tf.float32)).numpy()
        steps.append((np.float32(state), np.int32(action), stands))
        angle, speed = state.T  # A push to one side or the other turns it.
        state = np.stack([angle + 0.02 * speed, speed + 0.02 * (10.0 * angle + np.where(action, 10.0, -10.0))], axis=1)
        stands = stands & (np.abs(state[:, 0]) < 0.2)
    return map(np.stack, zip(*steps, strict=True))


def losses(batch):
    states, actions, returns, stood = batch
    wrong = (returns - critic(states)[:, 0]) * stood
    unlikely = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, actor(states))
    return tf.reduce_mean(tf.stop_gradient(wrong) * unlikely), tf.reduce_mean(tf.square(wrong))


actor_part = hs.Part("actor", actor, lambda both: both[0], keras.optimizers.Adam(0.02))
critic_part = hs.Part("critic", critic, lambda both: both[1], keras.optimizers.Adam(0.02))
step = hs.ComposedStep([actor_part, critic_part], losses)
train_step = tf.function(step)
for _ in range(30):
    states, actions, stood = play()
    returns = np.cumsum(stood[::-1], axis=0)[::-1] * stood  # how long each pole stands from here
    returns = np.float32((returns - returns[stood].mean()) / returns[stood].std())
    train_step((states.reshape(-1, 2), actions.reshape(-1), returns.reshape(-1), np.float32(stood).reshape(-1)))
    step.check()  # no Loop does it here
print(f"the poles stand for {stood.sum(axis=0).mean():.0f} of 100 steps")
