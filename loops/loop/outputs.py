"""What a train step may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from loops.support.errors import BadOutputs

Outputs = dict[str, np.ndarray]
"""The values of each output over the steps of a call: arrays [steps, ...]."""


def scalars_and_vectors(outputs: Outputs) -> tuple[Outputs, Outputs]:
    """The outputs of shape [steps], and those of more dimensions."""
    scalars = {name: value for name, value in outputs.items() if value.ndim == 1}
    return scalars, {name: value for name, value in outputs.items() if name not in scalars}


def check_outputs(outputs: Any) -> None:
    """Refuses anything but a dict of numbers and bools with at least one scalar.

    Raises:
        BadOutputs: Names the output, and says what is expected.
    """
    if not isinstance(outputs, dict) or not outputs:
        raise BadOutputs(f"the train step returned {outputs!r}: expected a dict of scalar tensors, such as its loss.")
    any_scalar = False
    for name, value in outputs.items():
        shape, dtype = _shape_and_dtype(name, value)
        numbers = dtype.is_floating or dtype.is_integer or dtype.is_bool
        if not isinstance(name, str) or not shape.is_fully_defined() or not numbers:
            raise BadOutputs(
                f"the train step returned {name!r} with shape {shape} and dtype {dtype.name}: expected names of "
                "numbers or bools, scalars or arrays of a shape that is known when the step is traced. Reduce it "
                "first, such as with tf.reduce_mean, or set its shape with tf.ensure_shape."
            )
        if name in ("attempted", "applied") and shape.rank != 0:
            raise BadOutputs(
                f"the train step returned {name!r} with shape {shape}: expected a scalar bool, which the loop counts. "
                "Return outcome.finite of the step's own apply as 'applied', or choose another name."
            )
        any_scalar = any_scalar or shape.rank == 0
    if not any_scalar:
        raise BadOutputs(
            f"the train step returned {name!r} with shape {shape} and no scalar: expected at least one, such as its "
            "loss. Reduce it first, such as with tf.reduce_mean."
        )


def _shape_and_dtype(name: object, value: Any) -> tuple[tf.TensorShape, tf.DType]:
    try:
        value = value if isinstance(value, tf.TensorSpec) else tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise BadOutputs(f"the train step returned {name!r}: {value!r}: expected a tensor.") from error
    return value.shape, value.dtype
