"""Makes the frames of a step: each tensor of its traced graph, with its measured values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from loops.diagnose.graph.dependencies import computed_from, is_measured, sources_of_other_inputs
from loops.diagnose.graph.frames import Frame, Part, magnitude
from loops.diagnose.graph.scaler_calls import ScalerCalls
from loops.diagnose.graph.whereabouts import Whereabouts, backward_layers
from loops.loop.state.variables import components

Handles = Mapping[str, tuple[str, float, bool]]
"""Captured variables by the names of their handles in the graph: dtype, largest magnitude, whether there is a NaN."""


def handles_of(concrete: tf.types.experimental.ConcreteFunction) -> Handles:
    """Measures the floating-point variables that a function captured.

    Args:
        concrete: The function, before it is called.
    """
    variables = {id(part.handle): part for variable in concrete.variables for part in components(variable)}
    captured = concrete.captured_inputs
    inside = concrete.inputs[len(concrete.inputs) - len(captured) :]
    return {
        placeholder.name: (variables[id(handle)].dtype.name, *_held(variables[id(handle)]))
        for handle, placeholder in zip(captured, inside, strict=True)
        if id(handle) in variables
    }


def _held(variable: tf.Variable) -> tuple[float, bool]:
    return magnitude(variable.numpy()) if is_measured(variable.dtype) else (0.0, False)


def frames_of_step(
    operations: Sequence[tf.Operation],
    values: Mapping[str, tf.Tensor],
    calls: ScalerCalls,
    places: Whereabouts,
    given: set[str],
    handles: Handles,
) -> dict[str, Frame]:
    """A frame for each tensor that can hold a NaN or an infinity, and for the integers of the batch.

    Args:
        operations: The operations of the step's graph.
        values: The value of each tensor, by its name.
        calls: What the step passed to its scalers.
        places: The layers of the operations.
        given: The names of the batch's tensors.
        handles: The variables as they were before the step.
    """
    layers = backward_layers([one.name for one in operations], places.by_number(len(operations)))
    penalties, customs = places.in_regularizers(), places.in_customs()
    variables = _Variables(handles)
    frames: dict[str, Frame] = {}
    for number, (operation, layer, part) in enumerate(zip(operations, layers, _parts(operations, calls), strict=True)):
        inputs = tuple(computed_from(operation))
        read = variables.read_by(operation, inputs)
        if operation.type != "ReadVariableOp":
            frames.update({name: variables.frame(name, part, layer) for name in read if name in handles})
        for tensor in operation.outputs:
            if tensor.name not in values or not (is_measured(tensor.dtype) or tensor.name in given):
                continue
            amax, has_nan = magnitude(values[tensor.name])
            frame = Frame(
                name=tensor.name,
                kind=operation.type,
                dtype=tensor.dtype.name,
                part=part,
                layer=layer,
                inputs=inputs,
                amax=amax,
                has_nan=has_nan,
                source="batch" if tensor.name in given else variables.source(operation),
                penalty=number in penalties,
                custom=customs.get(number),
            )
            if not frame.finite:
                through, blind = sources_of_other_inputs(operation, given, handles)
                frame = dataclasses.replace(frame, through=(*read, *through), blind=blind)
            frames[tensor.name] = frame
    return frames


class _Variables:
    """Tells reads of a variable's value before the step from reads of values that the step assigned.

    Args:
        handles: The variables as they were before the step.
    """

    def __init__(self, handles: Handles):
        self._handles = handles
        self._assigned: dict[str, list[str]] = {}

    def read_by(self, operation: tf.Operation, inputs: Sequence[str]) -> list[str]:
        """The sources of the values that an operation reads from variables.

        Call it once for each operation, in the order of the graph.

        Args:
            operation: The operation.
            inputs: The names of the tensors that it reads.

        Returns:
            The handles of variables that were not finite before the step, and the tensors assigned to the others.
        """
        names = [one.name for one in operation.inputs if one.name in self._handles]
        spoilt = [name for name in names if not self.frame(name, Part.OTHER, None).finite]
        read = [one for name in names if name not in spoilt for one in self._assigned.get(name, [])]
        if operation.type == "ReadVariableOp":
            return [] if spoilt else read
        given = [*inputs, *(one.name for one in operation.outputs)]
        for name in names:
            self._assigned.setdefault(name, []).extend(given)
        return [*spoilt, *([] if _only_assigns(operation) else read)]

    def source(self, operation: tf.Operation) -> str | None:
        """Returns "variable" for a read of a variable to which the step has not assigned yet, else None."""
        if operation.type != "ReadVariableOp":
            return None
        name = operation.inputs[0].name
        was_finite = name in self._handles and self.frame(name, Part.OTHER, None).finite
        return None if was_finite and self._assigned.get(name) else "variable"

    def frame(self, name: str, part: Part, layer: str | None) -> Frame:
        """The frame of a variable as it was before the step."""
        dtype, amax, has_nan = self._handles[name]
        return Frame(name, "ReadVariableOp", dtype, part, layer, (), amax, has_nan, "variable")


def _only_assigns(operation: tf.Operation) -> bool:
    return not operation.outputs


def _parts(operations: Sequence[tf.Operation], calls: ScalerCalls) -> list[Part]:
    """The part of each operation: forward until a loss is scaled, then backward until its gradients are passed.

    Of several losses a later one has its forward pass behind that: what it is computed from.
    """
    parts, now, moments = [], Part.FORWARD, list(calls.moments)
    ahead = _upstream([loss.op for loss in calls.losses if operations and loss.graph is operations[0].graph])
    for number, operation in enumerate(operations):
        while moments and moments[0][1] <= number:
            now = Part.BACKWARD if moments.pop(0)[0] else Part.OTHER
        part = Part.FORWARD if operation in ahead else now
        parts.append(Part.BACKWARD if operation.name.startswith("gradient_tape/") else part)
    return parts


def _upstream(operations: Sequence[tf.Operation]) -> set[tf.Operation]:
    """These operations, and all that their values are computed from."""
    waiting, seen = list(operations), set()
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [one.op for one in operation.inputs]
    return seen
