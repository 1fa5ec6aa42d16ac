"""Guards by what the columns that no example fills are named: keys where a batch has them, else numbers."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from loops.diagnose.explain.examples import lost_columns

GOOD = tf.ones([4, 3])
LOST = tf.constant(np.where(np.arange(3) == 2, np.nan, np.ones([4, 3])), tf.float32)


class Pair(NamedTuple):
    image: tf.Tensor
    label: tf.Tensor


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (LOST, ((0, 2),)),
        ((GOOD, LOST), ((1, 2),)),
        # TensorFlow sorts the keys: "u" comes first.
        (({"v": LOST, "u": GOOD}, GOOD), (("v", 2),)),
        (({"v": GOOD, "u": GOOD}, LOST), ((2, 2),)),
        ({"left": {"x": GOOD}, "right": {"x": LOST}}, (("right/x", 2),)),
        (({"x": GOOD}, {"x": LOST}), (("1/x", 2),)),
        (Pair(GOOD, LOST), (("label", 2),)),
        ({"x": LOST[:, 2]}, (("x", None),)),
        ({3: GOOD, 10: LOST}, (("10", 2),)),
    ],
)
def test_the_part_is_named(batch, found):
    assert lost_columns(batch) == found
