"""Finds where a non-finite value began, from the frames of one step. Pure.

The order in which a graph runs does not define a first operation. The search goes back from the failed tensors through
tensors that are not finite, until all inputs of one are finite. Integers and strings are never infinite or NaN, so it
passes through them to the tensors behind them. It never meets an infinity that nothing inherits, such as a mask's.


Finds the measurable tensors that an operation depends on, also through values that cannot be measured.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

import tensorflow as tf

from loops.diagnose.graph.whereabouts import Frame, Part


def origins(frames: Mapping[str, Frame], failed: Iterable[str]) -> list[Frame]:
    """The frames in which the failure began, the likeliest first.

    Args:
        frames: The frames by name, in the order in which their operations were created.
        failed: The names of the non-finite frames to explain.
    """
    found: dict[str, Frame] = {}
    seen: set[str] = set()
    stack = [name for name in failed if name in frames]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        inherited = _not_finite(frames[name].inputs, frames) or _not_finite(frames[name].through, frames)
        if not inherited:
            found[name] = frames[name]
        stack += inherited
    order = {name: place for place, name in enumerate(frames)}
    return sorted(found.values(), key=lambda frame: (_rank(frame), order[frame.name]))


def _not_finite(names: Iterable[str], frames: Mapping[str, Frame]) -> list[str]:
    return [name for name in names if name in frames and not frames[name].finite]


def _rank(frame: Frame) -> int:
    """Inputs come first, then computed tensors. Constants come last, since a mask is infinite on purpose."""
    if frame.source == "batch":
        return 0
    if frame.source == "variable":
        return 1
    return 3 if frame.kind == "Const" else 2


def pass_of(frame: Frame, frames: Mapping[str, Frame]) -> str:
    """One of "data", "weights", "forward" and "backward". A cast of data or weights to 16 bits counts to its source."""
    source = frame.source
    if source is None and frame.kind == "Cast":
        sources = [frames[name].source for name in frame.inputs or frame.through if name in frames]
        source = sources[0] if sources else None
    if source == "batch":
        return "data"
    if source == "variable" and frame.part is Part.FORWARD:
        return "weights"
    # A variable that is read after the backward pass holds a sum of gradients.
    return "forward" if frame.part is Part.FORWARD else "backward"


def nearest_layer(frame: Frame, frames: Mapping[str, Frame]) -> str | None:
    """The closest layer from which a tensor outside all layers, or a gradient's forward tensor, was computed."""
    level = [differentiated(frame, frames)]
    seen = {one.name for one in level}
    while level:
        below: list[Frame] = []
        for one in level:
            if one.layer is not None:
                return one.layer
            fresh = [frames[name] for name in one.inputs if name in frames and name not in seen]
            seen.update(other.name for other in fresh)
            below += fresh
        level = below
    return None


def differentiated(frame: Frame, frames: Mapping[str, Frame]) -> Frame:
    """The forward tensor of a gradient, found by the gradient's name scope; the frame itself if there is none."""
    scope = frame.name.removeprefix("gradient_tape/").rpartition("/")[0]
    return frames.get(f"{scope}:0", frame) if frame.name.startswith("gradient_tape/") else frame


_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case")
"""Calls and loops: they may capture a resource that does not affect their outputs."""


def is_measured(dtype: tf.DType) -> bool:
    """Whether the dtype can hold a NaN or an infinity."""
    return bool(dtype.is_floating or dtype.is_complex)


def computed_from(operation: tf.Operation) -> Iterator[str]:
    """The names of the floating-point and complex tensors that an operation reads.

    For a tensor list, as a loop uses it, these are the tensors and the resource handles that the list is built from.
    """
    waiting = list(operation.inputs)
    seen: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if is_measured(tensor.dtype) or (seen and tensor.dtype == tf.resource):
            yield tensor.name
        elif tensor.dtype == tf.variant and tensor.op.name not in seen:
            seen.add(tensor.op.name)
            waiting += tensor.op.inputs


def sources_of_other_inputs(
    operation: tf.Operation, given: Container[str], variables: Container[str]
) -> tuple[list[str], bool]:
    """The measurable tensors from which an operation's other inputs, such as integers, were computed.

    Args:
        operation: An operation of the graph.
        given: The names of the batch's tensors.
        variables: The names of the variables' handles.

    Returns:
        The names of these tensors, and whether one of them comes from a string, a table, an iterator or the like.
    """
    waiting = [one for one in operation.inputs if not is_measured(one.dtype)]
    found, seen, blind = [], set(), False
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or tensor.name in variables:
            continue
        seen.add(tensor.name)
        if is_measured(tensor.dtype) or (tensor.name in given and tensor.dtype.is_integer):
            found.append(tensor.name)
            continue
        blind = blind or _opaque(tensor)
        waiting += tensor.op.inputs
    return found, blind and operation.type not in _CALLS


def _opaque(tensor: tf.Tensor) -> bool:
    """Whether the tensor is a string, a resource or a variant from outside the graph."""
    kind = tensor.op.type
    outside = kind == "Placeholder" or (kind not in _CALLS and tensor.op.op_def.is_stateful)
    return outside and tensor.dtype in (tf.string, tf.resource, tf.variant)
