"""Characters of real source code that every Python brings: the standard library's own, and a small transformer."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sysconfig

import keras
import numpy as np
import tensorflow as tf

from loops.support.errors import LoopError

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Every other character, such as those beyond ASCII, is left out, and a tab is four spaces."""
_EVERY_HELD_OUT = 10
_LARGEST = 2_000_000


@dataclasses.dataclass(frozen=True)
class TextTask:
    """Next-character prediction, with everything a run needs.

    Attributes:
        name: As on the command line.
        characters: Uint8 [n], places in `ALPHABET`, to train on.
        test_characters: The same, of other files.
        context: Characters a prediction may look back at, and predictions in one example.
        width: Of the network.
        blocks: Of the network.
        test_examples: At most so many examples are held out.
        learning_rate: That suits it, of Adam.
        batch_size: That suits it.
    """

    name: str
    characters: np.ndarray
    test_characters: np.ndarray
    context: int = 64
    width: int = 64
    blocks: int = 2
    test_examples: int = 512
    learning_rate: float = 3e-3
    batch_size: int = 32

    def dataset(self, batch_size: int, seed: int) -> tf.data.Dataset:
        """Endless batches `(characters, following)`, int32 [batch, context], in an order given by `seed`.

        An epoch has each example once, shuffled anew; examples do not overlap.
        """
        inputs, following = self._examples(self.characters)
        # Places are shuffled, not examples: a checkpoint holds what the shuffle's buffer does.
        data = tf.data.Dataset.range(len(inputs)).shuffle(len(inputs), seed=seed, reshuffle_each_iteration=True)
        inputs, following = tf.constant(inputs), tf.constant(following)
        data = data.repeat().batch(batch_size, drop_remainder=True)
        data = data.map(
            lambda places: tuple(tf.cast(tf.gather(part, places), tf.int32) for part in (inputs, following))
        )
        return data.prefetch(tf.data.AUTOTUNE)

    def model(self, policy: str) -> keras.Model:
        """A causal transformer, built under a Keras dtype policy; it returns logits in float32.

        Pre-norm blocks as in "On Layer Normalization in the Transformer Architecture" (arXiv:2002.04745), with learnt
        positions.

        Args:
            policy: "float32", "mixed_float16", "mixed_bfloat16", "float16" or "bfloat16".
        """
        layers = keras.layers
        inputs = keras.Input([self.context], dtype="int32")
        x = layers.Embedding(len(ALPHABET), self.width, dtype=policy)(inputs)
        x = _Positions(dtype=policy)(x)
        for _ in range(self.blocks):
            normal = layers.LayerNormalization(dtype=policy)(x)
            attention = layers.MultiHeadAttention(4, self.width // 4, dtype=policy, flash_attention=False)
            x = layers.Add(dtype=policy)([x, attention(normal, normal, use_causal_mask=True)])
            normal = layers.LayerNormalization(dtype=policy)(x)
            hidden = layers.Dense(4 * self.width, activation="gelu", dtype=policy)(normal)
            x = layers.Add(dtype=policy)([x, layers.Dense(self.width, dtype=policy)(hidden)])
        x = layers.LayerNormalization(dtype=policy)(x)
        logits = layers.Dense(len(ALPHABET), dtype=policy)(x)
        return keras.Model(inputs, layers.Activation("linear", dtype="float32")(logits), name=self.name)

    def loss(self, following: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Mean cross-entropy in nats a character, scalar float32."""
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(following, tf.int32), tf.cast(logits, tf.float32))
        )

    def scores(self, model: keras.Model) -> dict[str, float]:
        """`perplexity`: e to the mean cross-entropy on held-out text; the alphabet's size if all were alike."""
        inputs, following = (part[: self.test_examples] for part in self._examples(self.test_characters))
        logits = model.predict(inputs.astype(np.int32), batch_size=64, verbose=0)
        loss = float(self.loss(following, logits))
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf if loss > 0 else math.nan}

    def _examples(self, characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = (len(characters) - 1) // self.context
        size = count * self.context
        return characters[:size].reshape(count, -1), characters[1 : size + 1].reshape(count, -1)


def load() -> TextTask:
    """The modules at the top of this Python's library, every tenth file by name held out.

    Of the others the first two million characters are trained on, more than a short run reads.
    Text differs between versions of Python, and perplexities with it.

    Raises:
        LoopError: If this Python was installed without its source.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    texts = [encode(path.read_text(encoding="utf-8", errors="replace")) for path in files]
    held_out = [text for place, text in enumerate(texts) if place % _EVERY_HELD_OUT == 0]
    rest = [text for place, text in enumerate(texts) if place % _EVERY_HELD_OUT]
    if sum(map(len, rest)) < 100_000:
        raise LoopError(
            f"the text is Python's own library, and {folder} has no source of it. Use a Python that was installed with "
            "its .py files, or the task digits."
        )
    return TextTask("text", np.concatenate(rest)[:_LARGEST], np.concatenate(held_out))


def encode(text: str) -> np.ndarray:
    """Places in `ALPHABET`, uint8."""
    places = {character: place for place, character in enumerate(ALPHABET)}
    return np.array([places[one] for one in text.expandtabs(4) if one in places], np.uint8)


class _Positions(keras.layers.Layer):
    """Adds a learnt vector for each place."""

    def build(self, input_shape: tuple) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="vectors")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.cast(self.vectors, x.dtype)
