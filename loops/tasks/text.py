"""Next-character prediction on the source of Python's standard library, with a small transformer."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sysconfig

import keras
import numpy as np
import tensorflow as tf

from loops.support.errors import LoopError
from loops.tasks.images import ahead

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""All other characters, such as those beyond ASCII, are left out, and a tab is four spaces."""
_EVERY_HELD_OUT = 10
_LARGEST = 2_000_000


@dataclasses.dataclass(frozen=True)
class TextTask:
    """Next-character prediction, with everything that a run needs.

    Attributes:
        name: The task's name on the command line.
        characters: The training text, uint8 [n], indices into `ALPHABET`.
        test_characters: The held-out text, from other files.
        context: The number of characters in an example, and the most that a prediction can see.
        width: The width of the network.
        blocks: The number of the network's blocks.
        test_examples: The most held-out examples.
        learning_rate: A suitable learning rate for Adam.
        batch_size: A suitable batch size.
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
        """Endless batches `(characters, following)`, int32 [batch, context], in an order determined by `seed`.

        An epoch has each example once, and is reshuffled; examples do not overlap.
        """
        inputs, following = self._examples(self.characters)
        # Shuffles indices, not examples: a checkpoint includes the shuffle's buffer.
        data = tf.data.Dataset.range(len(inputs)).shuffle(len(inputs), seed=seed, reshuffle_each_iteration=True)
        inputs, following = tf.constant(inputs), tf.constant(following)
        data = data.repeat().batch(batch_size, drop_remainder=True)
        data = data.map(
            lambda places: tuple(tf.cast(tf.gather(part, places), tf.int32) for part in (inputs, following))
        )
        return ahead(data)

    def model(self, policy: str, attend: type[keras.layers.MultiHeadAttention] | None = None) -> keras.Model:
        """A causal transformer, built under a Keras dtype policy; it returns logits in float32.

        Pre-norm blocks as in "On Layer Normalization in the Transformer Architecture" (arXiv:2002.04745), with learned
        positions.

        Args:
            policy: "float32", "mixed_float16", "mixed_bfloat16", "float16" or "bfloat16".
            attend: The class of the attention layers, a `keras.layers.MultiHeadAttention`, which is the default.
        """
        layers = keras.layers
        inputs = keras.Input([self.context], dtype="int32")
        x = layers.Embedding(len(ALPHABET), self.width, dtype=policy)(inputs)
        x = _Positions(dtype=policy)(x)
        for _ in range(self.blocks):
            normal = layers.LayerNormalization(dtype=policy)(x)
            attention = (attend or layers.MultiHeadAttention)(4, self.width // 4, dtype=policy, flash_attention=False)
            x = layers.Add(dtype=policy)([x, attention(normal, normal, use_causal_mask=True)])
            normal = layers.LayerNormalization(dtype=policy)(x)
            hidden = layers.Dense(4 * self.width, activation="gelu", dtype=policy)(normal)
            x = layers.Add(dtype=policy)([x, layers.Dense(self.width, dtype=policy)(hidden)])
        x = layers.LayerNormalization(dtype=policy)(x)
        logits = layers.Dense(len(ALPHABET), dtype=policy)(x)
        return keras.Model(inputs, layers.Activation("linear", dtype="float32")(logits), name=self.name)

    def loss(self, following: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Mean cross-entropy in nats per character, scalar float32."""
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(following, tf.int32), tf.cast(logits, tf.float32))
        )

    def scores(self, model: keras.Model) -> dict[str, float]:
        """`perplexity`: e to the mean cross-entropy on held-out text; a uniform guess gives the alphabet's size."""
        inputs, following = (part[: self.test_examples] for part in self._examples(self.test_characters))
        logits = model.predict(inputs.astype(np.int32), batch_size=64, verbose=0)
        loss = float(self.loss(following, logits))
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf if loss > 0 else math.nan}

    def _examples(self, characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = (len(characters) - 1) // self.context
        size = count * self.context
        return characters[:size].reshape(count, -1), characters[1 : size + 1].reshape(count, -1)


def load() -> TextTask:
    """The top-level modules of this Python's standard library, with every tenth file by name held out.

    The first two million characters of the others are for training, more than a short run reads. Text and perplexities
    differ between versions of Python.

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
            f"the text is Python's own library, but {folder} has no source files. Use a Python that was installed with "
            "its .py files, or the task digits."
        )
    return TextTask("text", np.concatenate(rest)[:_LARGEST], np.concatenate(held_out))


def encode(text: str) -> np.ndarray:
    """Encodes text as indices into `ALPHABET`, uint8."""
    places = {character: place for place, character in enumerate(ALPHABET)}
    return np.array([places[one] for one in text.expandtabs(4) if one in places], np.uint8)


class _Positions(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, input_shape: tuple) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="vectors")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.cast(self.vectors, x.dtype)
