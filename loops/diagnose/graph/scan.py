"""Runs one step and measures every floating-point and complex tensor of its graph.

Reading a tensor can prevent TensorFlow from fusing operations, and so change the result. The caller compares the scan
with the step as it runs to see whether it did. The frames of a step are each tensor of its traced graph, with its
measured values, and the line of Python that created it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.variables import components
from loops.diagnose.graph.calls import ScalerCalls, Whereabouts, recording_layers, recording_scaler_calls
from loops.diagnose.graph.operations import needed
from loops.diagnose.graph.origin import Frame, Part, computed_from, is_measured, magnitude, sources_of_other_inputs

_UNSEEN = (tf.string, tf.resource, tf.variant)
_SCAN = "loops/diagnose/graph/scan.py"
_PACKAGES = tuple(f"{pathlib.Path(__file__).parents[3] / name}/" for name in ("scaler", "loops", "halfstep"))
_OURS = (*_PACKAGES, "<frozen", "/bin/")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_FRAMEWORKS = tuple(f"{folder}{name}/" for folder in _INSTALLED for name in ("tensorflow", "keras", "numpy", "optree"))
"""Frameworks, with the packages through which they call a function of the user or of another package."""
_LAYER = "/keras/src/layers/"
_CALL = f"{_LAYER}layer.py"
_CUSTOM = "tensorflow/python/ops/custom_gradient.py"
_Handles = Mapping[str, tuple[str, float, bool]]
"""Captured variables by the names of their handles in the graph: dtype, largest magnitude, whether there is a NaN."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """The measured step.

    Attributes:
        outputs: The outputs of the step, as NumPy values.
        frames: The frames by tensor name, in the order in which their operations were created.
        losses: The names of the tensors that were passed to `scale`.
        gradients: For each `apply` and `unscale` the names of its gradients' tensors; None for a missing gradient.
        order: The layers' paths in the order of the forward pass, inner layers before outer ones.
        operations: The operations by the name of their output tensors.
        values: The values of the tensors, by name.
    """

    outputs: dict[str, Any]
    frames: dict[str, Frame]
    losses: list[str]
    gradients: list[list[str | None]]
    order: list[str]
    operations: dict[str, tf.Operation]
    values: dict[str, tf.Tensor]

    @property
    def failed(self) -> list[str]:
        """The names of the non-finite losses that the scaler got, or else of its non-finite gradients."""
        losses = [name for name in self.losses if name in self.frames and not self.frames[name].finite]
        grads = [name for given in self.gradients for name in given if name is not None]
        return losses or [name for name in grads if name in self.frames and not self.frames[name].finite]

    def line(self, name: str) -> str | None:
        """The line of Python that created a tensor; for a gradient, the line that created its forward tensor."""
        frame = self.frames[name]
        if frame.custom and (line := line_of(self.operations[name], behind=_CUSTOM)):
            return line
        if frame.part is Part.BACKWARD:
            read = [one for one in frame.inputs if one in self.frames]
            forward = [one for one in read if self.frames[one].part is Part.FORWARD]
            return next((line for one in forward if (line := line_of(self.operations[one]))), None)
        return line_of(self.operations[name])


def scan(
    take: Callable,
    batch: Any,
    layers: Mapping[str, keras.layers.Layer],
    scalers: Sequence[scaler.LossScaler],
    factor: float | None = None,
) -> Scan:
    """Runs a step and measures it. It may change weights and other state, which the caller restores.

    Args:
        take: The step, a function of a batch that XLA does not compile.
        batch: A batch of tensors.
        layers: The layers of the model, by path.
        scalers: The loss scalers of the step.
        factor: A number by which each loss is multiplied before `scale`; None for no change.
    """
    recorded: dict[str, Any] = {}
    at = None if factor is None else tf.constant(factor)

    def observed(batch: Any) -> tuple[Any, list[tf.Tensor]]:
        with recording_scaler_calls(scalers, at, moves=False) as calls, recording_layers(layers) as places:
            outputs = take(batch)
        # Measuring a tensor in the graph takes more operations than computing it, so the values are returned.
        seen = _numbers(tf.compat.v1.get_default_graph())
        recorded.update(calls=calls, places=places, batch=tf.nest.flatten(batch, expand_composites=True), seen=seen)
        return outputs, seen

    concrete = tf.function(observed).get_concrete_function(batch)
    handles = _handles_of(concrete)
    outputs, numbers = concrete(batch)
    calls, places = recorded["calls"], recorded["places"]
    values = {tensor.name: value for tensor, value in zip(recorded["seen"], numbers, strict=True)}
    operations = concrete.graph.get_operations()
    given = {tensor.name for tensor in recorded["batch"] if isinstance(tensor, tf.Tensor)}
    return Scan(
        outputs={name: value.numpy() for name, value in outputs.items()},
        frames=_frames_of_step(operations, values, calls, places, given, handles),
        losses=[loss.name for loss in calls.losses],
        gradients=[[_name(grad) for grad in grads] for grads in calls.gradients],
        order=places.order,
        operations={tensor.name: operation for operation in operations for tensor in operation.outputs},
        values=values,
    )


@tf.autograph.experimental.do_not_convert
def _numbers(graph: tf.Graph) -> list[tf.Tensor]:
    tensors = [tensor for operation in graph.get_operations() for tensor in operation.outputs]
    return [tensor for tensor in tensors if tensor.dtype not in _UNSEEN]


def _name(grad: Any) -> str | None:
    if grad is None:
        return None
    return (grad.values if isinstance(grad, tf.IndexedSlices) else grad).name


def line_of(operation: tf.Operation, behind: str = _SCAN) -> str | None:
    """The line of the user's code that created an operation, else that of the layer: "file.py:12".

    For a layer of an installed package it is the line in that package.

    Args:
        operation: The operation.
        behind: A file: what it was called by did not create the operation.
    """
    frames = list(operation.traceback or ())
    for file in (_SCAN, behind):
        last = max((place for place, frame in enumerate(frames) if frame.filename.endswith(file)), default=-1)
        frames = frames[last + 1 :]
    own, packages, layers = [], [], []
    for place, frame in enumerate(frames):
        installed, ours = (any(part in frame.filename for part in parts) for parts in (_INSTALLED, _OURS))
        if not (installed or ours or "/lib/python" in frame.filename):
            own.append(place)
        if installed and not ours and not any(part in frame.filename for part in _FRAMEWORKS):
            packages.append(place)
        if _LAYER in frame.filename:
            layers.append(place)
    calls = [place for place in layers if frames[place].filename.endswith(_CALL)]
    if own and packages and any(own[-1] < place < packages[-1] for place in calls):
        own = []
    for chosen in (own, packages, layers):
        if chosen:
            frame = frames[chosen[-1]]
            # Relative to the current folder or to site-packages.
            short = frame.filename.removeprefix(f"{pathlib.Path.cwd()}/").rpartition("site-packages/")[2]
            return f"{short}:{frame.lineno}"
    return None


def _handles_of(concrete: tf.types.experimental.ConcreteFunction) -> _Handles:
    """Measures the floating-point variables that a function captured.

    Args:
        concrete: The function, before it is called.
    """
    variables = {id(part.handle): part for variable in concrete.variables for part in components(variable)}
    captured = concrete.captured_inputs
    inside = concrete.inputs[len(concrete.inputs) - len(captured) :]
    return {
        placeholder.name: (one.dtype.name, *(magnitude(one.numpy()) if is_measured(one.dtype) else (0.0, False)))
        for handle, placeholder in zip(captured, inside, strict=True)
        if (one := variables.get(id(handle))) is not None
    }


def _frames_of_step(
    operations: Sequence[tf.Operation],
    values: Mapping[str, tf.Tensor],
    calls: ScalerCalls,
    places: Whereabouts,
    given: set[str],
    handles: _Handles,
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
    layers = places.with_backward([one.name for one in operations])
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

    def __init__(self, handles: _Handles):
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
        only_assigns = not operation.outputs
        return [*spoilt, *([] if only_assigns else read)]

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


def _parts(operations: Sequence[tf.Operation], calls: ScalerCalls) -> list[Part]:
    """The part of each operation: forward until a loss is scaled, then backward until its gradients are passed.

    Of several losses a later one has its forward pass behind that: what it is computed from.
    """
    parts, now, moments = [], Part.FORWARD, list(calls.moments)
    ahead = needed([loss.op for loss in calls.losses if operations and loss.graph is operations[0].graph])
    for number, operation in enumerate(operations):
        while moments and moments[0][1] <= number:
            now = Part.BACKWARD if moments.pop(0)[0] else Part.OTHER
        part = Part.FORWARD if operation in ahead else now
        parts.append(Part.BACKWARD if operation.name.startswith("gradient_tape/") else part)
    return parts
