"""Which example of a batch holds what is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from loops.diagnose.graph.carried import is_measured


def example_of(batch: Any) -> int | None:
    """The first example of a batch that holds what is not finite."""
    for part in tf.nest.flatten(batch):
        values, examples = _by_example(part)
        if values is None or not is_measured(values.dtype):
            continue
        wide = values.numpy().astype(np.complex128 if values.dtype.is_complex else np.float64)
        bad = examples[~np.isfinite(wide.reshape(len(examples), -1)).all(axis=1)]
        if len(bad):
            return int(bad.min())
    return None


def _by_example(part: Any) -> tuple[tf.Tensor | None, np.ndarray]:
    """The values of a part of a batch, and the position of the example of each row of them."""
    if isinstance(part, tf.SparseTensor):
        return part.values, part.indices.numpy()[:, 0]
    if isinstance(part, tf.RaggedTensor):
        outer, *inner = (rows.numpy() for rows in part.nested_value_rowids())
        for rows in inner:
            outer = outer[rows]
        return part.flat_values, outer
    if isinstance(part, tf.Tensor) and part.shape.rank:
        return part, np.arange(len(part))
    return None, np.empty(0)
