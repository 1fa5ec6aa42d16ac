"""What a loss function returned: a scalar, or a scalar and a dict of scalars by name."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import tensorflow as tf

from loops.support.errors import BadBatch, BadOutputs


def loss_and_extra(result: Any, taken: Container[str]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """The loss, and the scalars that its function returned with it.

    Args:
        result: What the function returned.
        taken: Names that the step itself returns.

    Raises:
        BadBatch: If the loss is one of no rows.
        BadOutputs: If it returned something else, or a scalar with a name that is taken.
    """
    loss, extra = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(extra, dict) or isinstance(loss, (tuple, list, dict)) or loss is None:
        raise BadOutputs(
            f"the loss function returned {result!r}: expected a scalar, or a scalar and a dict of scalars by name."
        )
    if tf.TensorShape(getattr(loss, "shape", ())) == tf.TensorShape([0]):
        raise BadBatch(
            "the batch has no rows: Keras's losses give no scalar for it, but an empty tensor. Leave such batches out "
            "of what gives them. As a batch of a tf.data.Dataset with an open number of rows, such as (None, 6), it "
            "is a step with a loss of 0."
        )
    twice = [name for name in extra if name in taken]
    if twice:
        raise BadOutputs(
            f"the loss function returned a scalar named {twice[0]!r}, which the step itself returns: rename it."
        )
    return loss, extra
