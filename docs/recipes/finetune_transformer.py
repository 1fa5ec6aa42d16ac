"""A small transformer in mixed float16: pretrained to guess hidden words, then fine-tuned to classify."""

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
LENGTH, WORDS, WIDTH, BLOCKS, HIDDEN = 12, 32, 32, 1, 0  # the word 0 stands for a hidden one
layers, cross_entropy = keras.layers, keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# Two languages: in one a word is followed by word + 3, in the other by word + 5, with some noise.
random = np.random.default_rng(0)
languages = random.integers(0, 2, 4096)
steps = np.where(languages, 5, 3)[:, None] * np.arange(LENGTH) + random.integers(0, WORDS, (4096, 1))
words = 1 + (steps + (random.random(steps.shape) < 0.25)) % (WORDS - 1)
hidden = np.where(random.random(words.shape) < 0.3, HIDDEN, words)


def make_encoder():
    tokens = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(WORDS, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(places)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal)
        inner = layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH)(inner)
    return keras.Model(tokens, layers.LayerNormalization()(x))


def train(name, model, x, y, optimizer, steps):
    """Makes the step anew for every phase: masters, optimizer and scale belong to one model."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4096, seed=0).repeat().batch(32)
    step = loops.TrainStep(model, cross_entropy, optimizer, loss_scaler=scaler.LossScaler(), clip_norm=1.0)
    losses = []
    keep = loops.Call(lambda visit: losses.extend(visit.outputs["loss"]), every=50)
    loops.Loop(step, dataset, steps_per_call=50, actions=[keep]).run(steps)
    print(f"{name}: loss {losses[0]:.2f} -> {np.mean(losses[-20:]):.2f}, {step.loss_scaler}")


encoder = make_encoder()
guesses = layers.Dense(WORDS, dtype="float32")(encoder.output)
train("hidden words", keras.Model(encoder.input, guesses), hidden, words, keras.optimizers.AdamW(2e-3), 200)

pooled = layers.GlobalAveragePooling1D()(encoder.output)
classifier = keras.Model(encoder.input, layers.Dense(2, dtype="float32")(pooled))
rate = keras.optimizers.schedules.CosineDecay(0.0, 100, warmup_target=1e-3, warmup_steps=20)
train("languages", classifier, words[:256], languages[:256], keras.optimizers.AdamW(rate), 100)
right = np.mean(np.argmax(classifier(words[2048:], training=False), axis=-1) == languages[2048:])
print(f"fine-tuned on 256 sentences: {right:.1%} of 2048 others are right")
