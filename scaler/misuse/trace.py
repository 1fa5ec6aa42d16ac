"""The units of the tensors of a trace: its operations, interpreted once, in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import (
    BRANCHES,
    LOOPS,
    calls_functions,
    captured_from,
    first_argument,
    functions_called,
    is_eager,
    outermost_function,
    variables_read,
)
from scaler.backend.variables import is_of_a_scaler
from scaler.misuse.marks import RETRIED, SCALED, UNSCALED, kind_of, owner_of_scale
from scaler.misuse.operations import unit_of_constant, units_of_results
from scaler.misuse.units import (
    ONE,
    UNKNOWN,
    Kept,
    Mixed,
    Note,
    Power,
    Source,
    Special,
    Unit,
    Unknown,
    Why,
    beside,
    choice,
    coming_from,
    is_plain,
    mapped,
    sources_of,
    total,
    unknown,
)

_TRACE = "halfstep_trace"
_LOOKED_AT = frozenset(
    (
        *("Identity", "Sub", "ZerosLike", "OnesLike", "TensorListReserve", "EmptyTensorList", "OptionalNone"),
        *("PyFunc", "PyFuncStateless", "EagerPyFunc", "Bitcast", "ParseTensor", "DecodeRaw", "StringToNumber"),
        *("PartitionedCall", "StatefulPartitionedCall", *BRANCHES, *LOOPS),
    )
)
"""Operations that may make something else than a plain tensor of plain ones."""
_MEMORIES = {
    "QueueDequeue": "a queue",
    "LookupTableFind": "a table",
    "StackPop": "a stack",
    "BarrierTakeMany": "a barrier",
    "Unstage": "a staging area",
    "MapUnstage": "a staging area",
    "OrderedMapUnstage": "a staging area",
    "ResourceAccumulatorTakeGradient": "an accumulator",
    "AccumulatorTakeGradient": "an accumulator",
}
"""How the types of operations begin that give out what was put into a memory."""
_ASSIGNS = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")
_UNIT_DOUBTFUL = Power(notes=frozenset([Note.DOUBTFUL]))
_UNIT_OF_MODEL = Power(notes=frozenset([Note.MODEL]))


class Either(NamedTuple):
    """What branches of one condition gave, of which the branches of the backward pass take each its own.

    Attributes:
        condition: The identity of the condition.
        units: What each branch gave.
        whole: What it is for everybody else.
    """

    condition: int
    units: tuple
    whole: Any


class Trace:
    """The units of all tensors that the outermost function has traced so far.

    Args:
        graph: That of the function.

    Attributes:
        own: Operations that are left out, and whether it is known what their results come from.
        unscaled: What each call of `unscale` was given whose variables are not known yet, and by which scaler.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.unscaled: list[tuple[object, Sequence]] = []
        self._frames: dict[int, _Frame] = {}
        self._weights: set[int] = set()
        self._shapes: set[tuple] = set()
        self.own: dict[Any, bool] = {}

    def units(self, tensors: Sequence[tf.Tensor], weights: Iterable = ()) -> list[Unit]:
        """The units of tensors of the graph that is being traced, or of those around it.

        Args:
            tensors: The tensors.
            weights: The trained variables of the model, which carry no scale.
        """
        natives = list(map(replicas.native, weights))
        # A variable of several replicas has no handle of its own.
        parts = [part for one in natives for part in getattr(one, "values", (one,))]
        handles = {id(part.handle) for part in parts if hasattr(part, "handle")}
        if not handles <= self._weights:
            self._weights |= handles
            self._shapes |= {tuple(one.shape) for one in natives}
            self._frames = {}
        here = self._frame(tf.compat.v1.get_default_graph())
        # Inside of a branch or a loop they may be tensors of a graph around it.
        frames = [here if is_eager(one) else self._frames.get(id(one.graph), here) for one in tensors]
        return [_whole(frame.value(one)) for frame, one in zip(frames, tensors, strict=True)]

    def knows_plain(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor certainly comes from no scale."""
        frame = self._frames.get(id(tensor.graph))
        return frame is not None and frame.is_plain(tensor)

    def leave_out(self, graph: Any, since: int, keeps_origins: bool) -> None:
        """Leaves out the operations of a graph that were added after so many."""
        self.own.update(dict.fromkeys(graph.get_operations()[since:], keeps_origins))

    def of_variable(self, handle: Any) -> Unit:
        """The unit of what a variable holds at first. It may be a scale, or another function filled it with gradients.

        Args:
            handle: Of the variable, as the outermost function captured it.
        """
        if id(handle) in self._weights:
            return _UNIT_OF_MODEL
        read = {id(getattr(one, "handle", None)): one for one in variables_read(self._graph).values()}
        variable = read.get(id(handle))
        if variable is None or is_of_a_scaler(variable):
            return UNKNOWN
        kept = Kept(id(handle), f"the variable {variable.name!r}")
        may_be_a_scale = variable.shape.rank in (0, None)
        return Unknown(frozenset([kept])) if may_be_a_scale else Power(notes=frozenset([Note.DOUBTFUL, kept]))

    def of_argument(self, tensor: tf.Tensor) -> Any:
        """The unit of an argument of a function that is being traced: data, or perhaps a scale or gradients."""
        if tensor.dtype == tf.resource:
            return tensor
        if not tensor.dtype.is_floating:
            return UNKNOWN if tensor.dtype == tf.variant else ONE
        shape = tensor.shape
        if shape.rank in (0, None):
            return UNKNOWN  # A scale, or its inverse.
        return _UNIT_DOUBTFUL if self._may_be_gradients(shape) else ONE

    def _may_be_gradients(self, shape: tf.TensorShape) -> bool:
        """Whether an argument may be a gradient, several of one weight, or all in one tensor."""
        dims = tuple(shape)
        if not any(dims) or (shape.rank == 1 and shape.is_fully_defined()) or dims in self._shapes:
            return True
        return shape.rank > 2 and dims[1:] in self._shapes

    def _frame(self, graph: Any) -> _Frame:
        """What is known of a graph that is being traced."""
        found = self._frames.get(id(graph))
        if found is None:
            outer = None if graph is self._graph else self._frame(graph.outer_graph)
            state = {} if outer is None else dict(outer.up_to_now().state)
            found = self._frames[id(graph)] = _Frame(self, graph, _OfOpenGraph(self, outer), state)
        return found.up_to_now()


def trace_here() -> Trace | None:
    """What is known of the trace that runs now. None in eager mode."""
    graph = outermost_function()
    if graph is None:
        return None
    if not hasattr(graph, _TRACE):
        setattr(graph, _TRACE, Trace(graph))
    return getattr(graph, _TRACE)


def units_of(tensors: Sequence[Any], weights: Iterable = ()) -> list[Unit]:
    """As `Trace.units`. In eager mode only a tensor's own mark is known."""
    trace = trace_here()
    return [_of_mark(tensor) or UNKNOWN for tensor in tensors] if trace is None else trace.units(tensors, weights)


def kinds_behind(tensors: Sequence[Any]) -> set[str]:
    """The kinds of the marks that tensors come from. In eager mode only a tensor's own mark is known."""
    sources = [source for unit in units_of(tensors) for source in sources_of(unit)]
    return {kind_of(source.mark.deref(), (RETRIED,)) or "" for source in sources}


@contextlib.contextmanager
def not_judged(keeps_origins: bool = False) -> Iterator[None]:
    """What is traced inside is a step's own doing, which no user can get wrong: its results count as unknown.

    Args:
        keeps_origins: Whether it stays known what they come from, as a derivative of them does.
    """
    graph, trace = tf.compat.v1.get_default_graph(), trace_here()
    since = 0 if trace is None else len(graph.get_operations())
    yield
    if trace is not None:
        trace.leave_out(graph, since, keeps_origins)


class _OfOpenGraph:
    """The units of the inputs of a graph that is being traced."""

    def __init__(self, trace: Trace, outer: _Frame | None) -> None:
        self._trace, self._outer = trace, outer

    def __call__(self, inner: tf.Tensor) -> Any:
        captured = captured_from(inner)
        if captured is None:
            return self._trace.of_argument(inner)
        if inner.dtype == tf.resource:
            return captured if self._outer is None or is_eager(captured) else self._outer.value(captured)
        if not is_eager(captured):
            return ONE if self._outer is None else self._outer.value(captured)
        # A vector of unknown origin may hold gradients.
        return UNKNOWN if inner.shape.rank == 1 and inner.dtype.is_floating else unit_of_constant(captured)


class _Frame:
    """The units of the tensors of one graph, in one call of it.

    Args:
        trace: The whole.
        graph: The graph.
        given: Returns the unit of an input; of a variable's handle, what the outermost function captured.
        state: The units of what variables hold, by their handles.
    """

    def __init__(self, trace: Trace, graph: Any, given: Callable[[tf.Tensor], Any], state: dict[int, Unit]) -> None:
        self.state = state
        self._trace, self._graph, self._given = trace, graph, given
        self._values: dict[int, Any] = {}
        self._entered: set[Any] = set()
        self._position = 0

    def up_to_now(self) -> _Frame:
        """Interprets what was added to the graph since the last time."""
        operations = self._graph.get_operations()
        for op in operations[self._position :]:
            if op not in self._entered:
                self._enter(op)
        self._position = len(operations)
        return self

    def outputs(self) -> list[Any]:
        """The units of what the function returns."""
        self.up_to_now()
        return [self.value(output) for output in self._graph.outputs]

    def value(self, tensor: Any) -> Any:
        """The unit of a tensor; what a handle stands for."""
        if is_eager(tensor):
            return _of_mark(tensor) or (unit_of_constant(tensor) if tensor.dtype.is_floating else ONE)
        if id(tensor) not in self._values:
            if tensor.op.type == "Placeholder":
                self._values[id(tensor)] = self._given(tensor)
            else:
                # It was left out, or not all of its graph is interpreted yet.
                self._values[id(tensor)] = _of_mark(tensor) or UNKNOWN
                if tensor.op in self._entered and calls_functions(tensor.op):
                    self._look_again(tensor.op)
        return self._values[id(tensor)]

    def _look_again(self, op: Any) -> None:
        """Interprets a loop that was differentiated since, which gave it further outputs."""
        state, self.state = self.state, dict(self.state)
        given = [self.value(one) for one in op.inputs]
        if self._trace.own.get(op):
            found: Sequence[Any] = self._opaque(op, given)
        else:
            found = self._call(op, given if op.type in BRANCHES else list(map(_whole, given)))
        self.state = state
        self._values.update((id(output), unit) for output, unit in zip(op.outputs, found, strict=False))

    def is_plain(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is known to come from no scale."""
        unit = self._values.get(id(tensor))
        return unit is ONE or unit is _UNIT_OF_MODEL

    def _enter(self, op: Any) -> None:
        kind, values = op.type, self._values
        own = self._trace.own.get(op)
        if kind == "Placeholder" or own is False:
            return
        self._entered.add(op)
        given: list[Any] = []
        plain, memory = kind not in _LOOKED_AT, False
        for one in op.inputs:
            unit = values.get(id(one))
            if unit is None:
                # A loop that was differentiated stacks its values on lists that were made after it.
                if one.op not in self._entered:
                    self._enter(one.op)
                unit = self.value(one)
            if isinstance(unit, Either) and kind not in BRANCHES:
                unit = unit.whole
            plain = plain and (unit is ONE or unit is _UNIT_OF_MODEL)
            memory = memory or one.dtype == tf.resource
            given.append(unit)
        found: Sequence[Any]
        if own:
            found = self._opaque(op, given)
        elif plain and given:
            found = [_UNIT_OF_MODEL if _UNIT_OF_MODEL in given else ONE] * len(op.outputs)
        else:
            found = _given_out(op)
            if not found:
                found = self._memory(op, given) if memory and not calls_functions(op) else self._visit(op, kind, given)
        # A function that was traced before it is differentiated shows what its later form returns, too, at the end.
        for output, unit in zip(op.outputs, found, strict=False):
            values[id(output)] = unit

    @staticmethod
    def _opaque(op: Any, given: list[Any]) -> list[Unit]:
        """What is known of the results of an operation into which nobody looks."""
        return [unknown(map(_whole, filter(_is_unit, given)))] * len(op.outputs)

    def _visit(self, op: Any, kind: str, given: list[Any]) -> Sequence[Any]:
        if kind == "Const":
            return [unit_of_constant(op.outputs[0])]
        if calls_functions(op):
            return self._call(op, given)
        if kind == "Identity":
            marked = _of_mark(op.outputs[0], given[0])
            if marked is not None:
                # A loop that is differentiated keeps what stands before an identity.
                self._values[id(op.inputs[0])] = marked
            return [given[0] if marked is None else marked]
        units = units_of_results(op, given)
        unit = units[0] if kind == "RealDiv" and _is_of_scales_alone(given[1]) else None
        if isinstance(unit, Power) and Note.CANCELLED in unit.notes:
            return [Power(unit.powers, unit.notes | {Note.UNSCALED})]
        return units

    def _call(self, op: Any, given: list[Any]) -> Sequence[Any]:
        bodies = functions_called(op)
        named = len(op.get_attr("branches")) if op.type.endswith("Case") else 2 if op.type in BRANCHES else 1
        if len(bodies) != named:
            return self._opaque(op, given)
        before = self.state
        if op.type in BRANCHES:
            found = self._branch(op, bodies, given)
        else:
            found = self._run(bodies[0], given)
            # What a loop adds up shows at its second turn.
            found = self._run(bodies[0], found) if op.type in LOOPS else found
        new = {cell: _outside(unit, bodies, op) for cell, unit in self.state.items() if before.get(cell) is not unit}
        self.state = {**self.state, **new}
        return [_outside(unit, bodies, op) for unit in found]

    def _run(self, body: Any, given: Sequence[Any]) -> list[Any]:
        units = {id(own): unit for own, unit in zip(body.inputs, given, strict=False)}
        frame = _Frame(self._trace, body, lambda inner: units.get(id(inner), UNKNOWN), self.state)
        found = frame.outputs()
        self.state = frame.state
        return found

    def _branch(self, op: Any, bodies: list[Any], given: list[Any]) -> list[Any]:
        condition, key = _whole(given[0]), id(op.inputs[0])
        before, states, outputs = self.state, [], []
        for place, body in enumerate(bodies):
            self.state = dict(before)
            outputs.append(self._run(body, [_of_branch(one, key, place) for one in given[first_argument(op) :]]))
            states.append(self.state)
        cells = {cell for state in states for cell in state}
        self.state = {cell: beside(state.get(cell, before.get(cell, UNKNOWN)) for state in states) for cell in cells}
        # Behind its own outputs are those for a backward pass, which have nothing in common.
        own = len(tf.nest.flatten(bodies[0].structured_outputs, expand_composites=True))

        def chosen(place: int, units: tuple) -> Any:
            if not _is_unit(units[0]):
                return units[0]
            whole = tuple(map(_whole, units))
            if len(set(whole)) == 1 and is_plain(condition):
                return whole[0]
            return Either(key, whole, choice(condition, whole, op.name) if place < own else beside(whole))

        return [chosen(place, units) for place, units in enumerate(zip(*outputs, strict=False))]

    def _memory(self, op: Any, given: list[Any]) -> list[Any]:
        """What an operation on a variable, a queue or a table gives, and what is kept there after it."""
        if op.type.startswith("Iterator"):
            return list(map(self._trace.of_argument, op.outputs))
        cell = next(unit for unit, one in zip(given, op.inputs, strict=True) if one.dtype == tf.resource)
        if not tf.is_tensor(cell):
            return [UNKNOWN] * len(op.outputs)  # Nothing tells which memory it is.
        rest = [unit for unit, one in zip(given, op.inputs, strict=True) if one.dtype.is_floating]
        held = self.state.get(id(cell))
        if held is None:
            held = self._trace.of_variable(cell)
        if op.type == "AssignVariableOp":
            self.state[id(cell)] = rest[0] if rest else ONE
        elif op.type.startswith(_ASSIGNS) and rest:
            self.state[id(cell)] = total([held, *rest], Why.SUM, op.name)
        return [held if one.dtype.is_floating else ONE for one in op.outputs]


def _given_out(op: Any) -> list[Unit]:
    """The units of what was put into a queue or a table, perhaps by an earlier call; an empty list for others."""
    name = next((name for begin, name in _MEMORIES.items() if op.type.startswith(begin)), None)
    return [] if name is None else [Unknown(frozenset([Kept(id(op), name, is_variable=False)]))] * len(op.outputs)


def _of_mark(tensor: tf.Tensor, before: Unit = UNKNOWN) -> Unit | None:
    """The unit of a marked tensor; None for others.

    Args:
        tensor: The tensor.
        before: The unit of what was marked, as far as it is known.
    """
    kind = kind_of(tensor, (RETRIED,))
    if kind is None:
        return None
    owner: Any = owner_of_scale(tensor)
    source = Source(tensor.ref(), owner, None if is_eager(tensor) else tensor.op)
    if kind == SCALED:
        return coming_from(before, source)
    if kind == UNSCALED:
        return Power(notes=frozenset([Note.UNSCALED, source]))
    if owner is None:
        return Unknown(frozenset([source]))
    return Power(frozenset() if owner.is_one else frozenset([(owner, 1.0)]), frozenset([source]))


def _outside(value: Any, bodies: Sequence[Any], call: Any) -> Any:
    """A unit as it is seen outside of functions: what was made inside of them comes from the call."""

    def seen(origin: Any) -> Any:
        operation = getattr(origin, "operation", None)
        is_inside = operation is not None and any(operation.graph is body for body in bodies)
        return origin._replace(operation=call) if is_inside else origin

    if isinstance(value, Either):
        units = tuple(_outside(unit, bodies, call) for unit in value.units)
        return Either(value.condition, units, _outside(value.whole, bodies, call))
    return mapped(value, seen) if _is_unit(value) and value is not ONE and value is not _UNIT_OF_MODEL else value


def _is_unit(value: Any) -> bool:
    """Whether it is a unit, and not the handle of a memory."""
    return isinstance(value, Power | Mixed | Unknown | Special | Either)


def _is_of_scales_alone(unit: Any) -> bool:
    """Whether a factor is made of scales and constants."""
    known = isinstance(unit, Power) and bool(unit.powers)
    return known and not unit.notes & {Note.UNSCALED, Note.CANCELLED, Note.MODEL, Note.DOUBTFUL}


def _whole(value: Any) -> Any:
    return value.whole if isinstance(value, Either) else value


def _of_branch(value: Any, condition: int, place: int) -> Any:
    if isinstance(value, Either):
        return value.units[place] if value.condition == condition else value.whole
    return value
