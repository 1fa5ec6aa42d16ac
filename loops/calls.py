"""A train step compiled into calls of many steps: one visit of the host each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from loops.errors import BadOutputs

Outputs = dict[str, np.ndarray]
TrainStepFunction = Callable[..., dict[str, tf.Tensor]]


class StepCalls:
    """Runs a train step over an iterator, up to n steps a call.

    `steps_per_call=1` is a Python loop around a compiled step. More is a loop inside the graph, which takes batches
    and stacks outputs there, so that the host is asked once a call.

    Args:
        train_step: Any callable from a batch to a dict of scalar tensors.
        element_spec: The dataset's.
        jit_compile: Whether XLA compiles the step.
    """

    def __init__(self, train_step: TrainStepFunction, element_spec, *, in_graph: bool, jit_compile: bool):
        self._step = tf.function(train_step, jit_compile=jit_compile or None)
        self._spec = element_spec
        self._in_graph = in_graph
        self._many = tf.function(self._loop)

    def __call__(self, iterator, limit: int) -> tuple[int, Outputs]:
        """Takes up to `limit` batches: how many there were, and arrays of shape [taken] for each output."""
        if self._in_graph:
            taken, outputs = self._many(iterator, tf.constant(limit))
            taken = int(taken)
            return taken, {name: value.numpy()[:taken] for name, value in outputs.items()}
        try:
            batch = next(iterator)
        except StopIteration:
            return 0, {}
        outputs = self._step(batch)
        _check_outputs(outputs)
        return 1, {name: tf.convert_to_tensor(value).numpy()[np.newaxis] for name, value in outputs.items()}

    def _loop(self, iterator, limit):
        # The step's outputs must be known before the loop is built: tracing it also creates its variables.
        specs = self._step.get_concrete_function(self._spec).structured_outputs
        _check_outputs(specs)
        arrays = {name: tf.TensorArray(spec.dtype, size=limit, element_shape=[]) for name, spec in specs.items()}

        def take(taken, arrays, batch):
            outputs = self._step(batch)
            return taken + 1, {name: array.write(taken, outputs[name]) for name, array in arrays.items()}

        def body(taken, more, arrays):
            del more
            batch = iterator.get_next_as_optional()
            more = batch.has_value()
            taken, arrays = tf.cond(more, lambda: take(taken, arrays, batch.get_value()), lambda: (taken, dict(arrays)))
            return taken, more, arrays

        taken, _, arrays = tf.while_loop(
            lambda taken, more, arrays: tf.logical_and(more, taken < limit), body, (0, True, arrays)
        )
        return taken, {name: array.stack() for name, array in arrays.items()}


def _check_outputs(outputs) -> None:
    if not isinstance(outputs, dict) or not outputs:
        raise BadOutputs(f"the train step returned {outputs!r}: expected a dict of scalar tensors, such as its loss.")
    for name, value in outputs.items():
        if not isinstance(value, tf.TensorSpec):
            value = tf.convert_to_tensor(value)
        if not isinstance(name, str) or value.shape.rank != 0:
            raise BadOutputs(
                f"the train step returned {name!r} with shape {value.shape}: expected names of scalar tensors. "
                "Reduce it first, such as with tf.reduce_mean."
            )
