"""The frames of a step: its traced graph, with what its tensors held."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from loops.diagnose.graph.carried import carried_to, computed_from, is_measured
from loops.diagnose.graph.frames import Frame, Part, magnitude
from loops.diagnose.graph.listening import Heard
from loops.diagnose.graph.whereabouts import Whereabouts, backward_layers
from loops.loop.state.variables import components

Handles = Mapping[str, tuple[str, float, bool]]
"""Of variables that a graph captured, by the names of their handles there: dtype, magnitude, whether there is a NaN."""


def handles_of(concrete: tf.types.experimental.ConcreteFunction) -> Handles:
    """What the floating-point variables hold that a function captured.

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


def framed(
    operations: Sequence[tf.Operation],
    values: Mapping[str, tf.Tensor],
    heard: Heard,
    places: Whereabouts,
    given: set[str],
    handles: Handles,
) -> dict[str, Frame]:
    """A frame for each tensor in which a NaN or an infinity could be, and for the batch's integers.

    Args:
        operations: Of the step.
        values: By name of tensor.
        heard: What the step handed to its scalers.
        places: The layers of operations.
        given: The names of the batch's tensors.
        handles: What variables held before the step.
    """
    layers = backward_layers([one.name for one in operations], places.by_number(len(operations)))
    penalties, customs = places.in_regularizers(), places.in_customs()
    variables = _Variables(handles)
    frames: dict[str, Frame] = {}
    for number, (operation, layer, part) in enumerate(zip(operations, layers, _parts(operations, heard), strict=True)):
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
                through, blind = carried_to(operation, given, handles)
                frame = dataclasses.replace(frame, through=(*read, *through), blind=blind)
            frames[tensor.name] = frame
    return frames


class _Variables:
    """Which operations read what variables held before the step, and which what was assigned in it.

    Args:
        handles: Of the variables.
    """

    def __init__(self, handles: Handles):
        self._handles = handles
        self._assigned: dict[str, list[str]] = {}

    def read_by(self, operation: tf.Operation, inputs: Sequence[str]) -> list[str]:
        """Where what an operation reads from variables comes from: handles of those that were not finite, and tensors.

        Args:
            operation: In the order of the graph, each once.
            inputs: The tensors that it reads.
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
        """Says "variable" of an operation that reads one to which the step assigned nothing before."""
        if operation.type != "ReadVariableOp":
            return None
        name = operation.inputs[0].name
        was_finite = name in self._handles and self.frame(name, Part.OTHER, None).finite
        return None if was_finite and self._assigned.get(name) else "variable"

    def frame(self, name: str, part: Part, layer: str | None) -> Frame:
        """A variable as it was before the step, where an operation reads it."""
        dtype, amax, has_nan = self._handles[name]
        return Frame(name, "ReadVariableOp", dtype, part, layer, (), amax, has_nan, "variable")


def _only_assigns(operation: tf.Operation) -> bool:
    return not operation.outputs


def _parts(operations: Sequence[tf.Operation], heard: Heard) -> list[Part]:
    """Forward until a loss is scaled, backward until its gradients are taken, and so on."""
    parts, now, moments = [], Part.FORWARD, list(heard.moments)
    for number, operation in enumerate(operations):
        while moments and moments[0][1] <= number:
            now = Part.BACKWARD if moments.pop(0)[0] else Part.OTHER
        parts.append(Part.BACKWARD if operation.name.startswith("gradient_tape/") else now)
    return parts
