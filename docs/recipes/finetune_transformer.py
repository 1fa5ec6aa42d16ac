"""A small transformer in mixed float16: pretrained to guess hidden words, then fine-tuned to classify."""

import keras
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
layers, cross_entropy = keras.layers, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Two languages: in one a word is followed by word + 3, in the other by word + 5. The word 0 hides another.
random = np.random.default_rng(0)
languages = random.integers(0, 2, 4096)
words = 1 + (np.where(languages, 5, 3)[:, None] * np.arange(12) + random.integers(0, 31, (4096, 1))) % 31
hidden = np.where(random.random(words.shape) < 0.3, 0, words)

tokens = keras.Input((12,), dtype="int32")
places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
x = layers.Embedding(32, 32)(tokens) + layers.Embedding(12, 32)(places)
normal = layers.LayerNormalization()(x)
x = x + layers.MultiHeadAttention(4, 8)(normal, normal)
x = x + layers.Dense(32)(layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x)))
encoded = layers.LayerNormalization()(x)


def train(name, outputs, x, y, optimizer, steps):
    """Makes the step again for every phase: masters, optimizer and scale belong to one model."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4096, seed=0).repeat().batch(32)
    step = hs.TrainStep(keras.Model(tokens, outputs), cross_entropy, optimizer, clip_norm=1.0)
    hs.Loop(step, dataset, steps_per_call=50).run(steps)
    print(f"{name}: {step.loss_scaler}")


train("hidden words", layers.Dense(32, dtype="float32")(encoded), hidden, words, keras.optimizers.AdamW(2e-3), 200)
answers = layers.Dense(2, dtype="float32")(layers.GlobalAveragePooling1D()(encoded))
rate = keras.optimizers.schedules.CosineDecay(0.0, 100, warmup_target=1e-3, warmup_steps=20)
train("languages", answers, words[:256], languages[:256], keras.optimizers.AdamW(rate), 100)
right = np.mean(np.argmax(keras.Model(tokens, answers)(words[2048:]), axis=-1) == languages[2048:])
print(f"fine-tuned on 256 sentences: {right:.1%} of 2048 others are right")
