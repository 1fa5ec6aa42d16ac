"""Sums of many products whose accumulator is a short format, in three ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import scaler

CHUNK = 64
WAYS = ("in order", "chunks", "at random")

Summation = Callable[[np.ndarray, np.ndarray, tuple[int, int]], np.ndarray]


def summation(format: str, way: str) -> Summation:
    """Sums the outer products of rows; each sum is rounded after each addition.

    Products are float32: they are exact where both operands have few bits.

    Args:
        format: The accumulator's, as `scaler.formats.rounded` names it.
        way: "in order": each product is added to the sum, rounded to nearest. "chunks": those of a chunk are added by
            themselves, and then their sum to the sum, all rounded to nearest. "at random": in order, rounded at random.

    Returns:
        A function of float32 [n, i] and [n, j], where n is a multiple of `CHUNK`, and two integers that determine what
        is drawn. It returns the sums so far after each chunk, float32 [n / CHUNK, i, j].
    """

    def in_chunks(left: tf.Tensor, right: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return _across(_within(left, right, format), format)

    def in_order(left: tf.Tensor, right: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return _ordered(left, right, format, seed if way == "at random" else None)

    rows = tf.TensorSpec([None, CHUNK, None], tf.float32)
    # Traced once for all shapes, explicitly: TensorFlow warns about functions that calls trace repeatedly.
    traced = tf.function(in_chunks if way == "chunks" else in_order, autograph=True).get_concrete_function(
        rows, rows, tf.TensorSpec([2], tf.int32)
    )

    def sums(left: np.ndarray, right: np.ndarray, seed: tuple[int, int]) -> np.ndarray:
        chunked = [tf.constant(each.reshape(-1, CHUNK, each.shape[1]), tf.float32) for each in (left, right)]
        return traced(*chunked, tf.constant(seed, tf.int32)).numpy()

    return sums


def _within(left: tf.Tensor, right: tf.Tensor, format: str) -> tf.Tensor:
    """The sum of each chunk [chunks, i, j], all chunks at once."""
    total = tf.zeros([tf.shape(left)[0], tf.shape(left)[2], tf.shape(right)[2]])
    for row in tf.range(CHUNK):
        product = left[:, row, :, None] * right[:, row, None, :]
        total = scaler.formats.rounded(total + product, format)
    return total


def _across(chunks: tf.Tensor, format: str) -> tf.Tensor:
    """The sum of the chunks so far, after each."""
    total, count = tf.zeros_like(chunks[0]), tf.shape(chunks)[0]
    rows = tf.TensorArray(tf.float32, count)
    for chunk in tf.range(count):
        total = scaler.formats.rounded(total + chunks[chunk], format)
        rows = rows.write(chunk, total)
    return rows.stack()


def _ordered(left: tf.Tensor, right: tf.Tensor, format: str, seed: tf.Tensor | None) -> tf.Tensor:
    """The sum of the products so far, after each chunk of them."""
    total, count = tf.zeros([tf.shape(left)[2], tf.shape(right)[2]]), tf.shape(left)[0]
    rows = tf.TensorArray(tf.float32, count)
    for chunk in tf.range(count):
        for row in tf.range(CHUNK):
            product = left[chunk, row, :, None] * right[chunk, row, None, :]
            drawn = None if seed is None else seed * 2**20 + tf.stack([chunk, row])
            total = scaler.formats.rounded(total + product, format, seed=drawn)
        rows = rows.write(chunk, total)
    return rows.stack()
