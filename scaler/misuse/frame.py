"""The units of the tensors of one graph: its operations, interpreted once, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.graphs import (
    BRANCHES,
    LOOPS,
    calls_functions,
    first_argument,
    functions_called,
    is_eager,
)
from scaler.misuse.marks import RETRIED, SCALED, UNSCALED, kind_of, owner_of_scale
from scaler.misuse.operations import unit_of_constant, units_of_results
from scaler.misuse.units import (
    ONE,
    UNKNOWN,
    Kept,
    Mixed,
    Note,
    Power,
    Share,
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
    total,
    unknown,
)
from scaler.misuse.upstream import carries

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
_BEGIN_MEMORIES = tuple(_MEMORIES)
_ASSIGNS = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")
UNIT_OF_MODEL = Power(notes=frozenset([Note.MODEL]))


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


class Frame:
    """The units of the tensors of one graph, in one call of it.

    Args:
        trace: The `Trace`.
        graph: The graph.
        given: Returns the unit of an input; of a variable's handle, what the outermost function captured.
        state: The units of what variables hold, by their handles.
    """

    def __init__(self, trace: Any, graph: Any, given: Callable[[tf.Tensor], Any], state: dict[int, Unit]) -> None:
        self.state = state
        self._trace, self._graph, self._given = trace, graph, given
        self._values: dict[int, Any] = {}
        self._entered: set[Any] = set()
        self._position = 0

    def up_to_now(self) -> Frame:
        """Interprets what was added to the graph since the last time."""
        operations = self._graph.get_operations()
        for op in operations[self._position :]:
            if op not in self._entered:
                self._enter(op)
        self._position = len(operations)
        if self._trace.held_on is not None:
            self._trace.watch(self._values)
        return self

    def outputs(self) -> list[Any]:
        """The units of what the function returns."""
        self.up_to_now()
        return [self.value(output) for output in self._graph.outputs]

    def value(self, tensor: Any) -> Any:
        """The unit of a tensor; what a handle stands for."""
        if is_eager(tensor):
            return of_mark(tensor) or (unit_of_constant(tensor) if tensor.dtype.is_floating else ONE)
        if id(tensor) not in self._values:
            if tensor.op.type == "Placeholder":
                self._values[id(tensor)] = self._given(tensor)
            else:
                # It was left out, or not all of its graph is interpreted yet.
                self._values[id(tensor)] = of_mark(tensor) or UNKNOWN
        return self._values[id(tensor)]

    def _enter(self, op: Any) -> None:
        kind, values = op.type, self._values
        if kind == "Placeholder" or op in self._trace.own:
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
            plain = plain and (unit is ONE or unit is UNIT_OF_MODEL)
            memory = memory or one.dtype == tf.resource
            given.append(unit)
        found: Sequence[Any]
        if plain and given:
            found = [UNIT_OF_MODEL if UNIT_OF_MODEL in given else ONE] * len(op.outputs)
        else:
            found = self._memory(op, given) if memory and not calls_functions(op) else self._visit(op, kind, given)
            if self._trace.held_on is not None:
                units = [one if not is_unit(one) else whole_of(one) for one in given]
                found = [self._trace.held_on(op, units, unit) if is_unit(unit) else unit for unit in found]
        # A function that was traced before it is differentiated shows what its later form returns, too, at the end.
        for output, unit in zip(op.outputs, found, strict=False):
            # Masks, indices and counts are of no gradient, whatever decided about them.
            is_free = isinstance(unit, Unknown) and not (output.dtype.is_floating or carries(output))
            values[id(output)] = UNKNOWN if is_free else unit

    def _visit(self, op: Any, kind: str, given: list[Any]) -> Sequence[Any]:
        if kind == "Const":
            return [unit_of_constant(op.outputs[0])]
        if calls_functions(op):
            return self._call(op, given)
        if kind == "Identity":
            marked = of_mark(op.outputs[0], given[0])
            if marked is not None:
                # A loop that is differentiated keeps what stands before an identity.
                self._values[id(op.inputs[0])] = marked
            return [given[0] if marked is None else marked]
        if kind.startswith(_BEGIN_MEMORIES):
            return _given_out(op)
        if kind == "StopGradient":
            return [_stopped(given[0])]
        units = units_of_results(op, given)
        unit = units[0] if kind == "RealDiv" and _is_of_scales_alone(given[1]) else None
        if isinstance(unit, Power) and Note.CANCELLED in unit.notes:
            return [Power(unit.powers, unit.notes | {Note.UNSCALED})]
        return units

    def _call(self, op: Any, given: list[Any]) -> Sequence[Any]:
        bodies = functions_called(op)
        named = len(op.get_attr("branches")) if op.type.endswith("Case") else 2 if op.type in BRANCHES else 1
        if len(bodies) != named:
            return [unknown(map(whole_of, filter(is_unit, given)))] * len(op.outputs)
        before = dict(self.state)
        if op.type in BRANCHES:
            found = self._branch(op, bodies, given)
        elif op.type in LOOPS:
            found = self._loop(bodies[0], given)
        else:
            found = self._run(bodies[0], given)
        new = {cell: _outside(unit, bodies, op) for cell, unit in self.state.items() if before.get(cell) is not unit}
        self.state = {**self.state, **new}
        return [_outside(unit, bodies, op) for unit in found]

    def _run(self, body: Any, given: Sequence[Any]) -> list[Any]:
        units = {id(own): unit for own, unit in zip(body.inputs, given, strict=False)}
        frame = Frame(self._trace, body, lambda inner: units.get(id(inner), UNKNOWN), self.state)
        found = frame.outputs()
        self.state = frame.state
        return found

    def _loop(self, body: Any, given: list[Any]) -> list[Any]:
        """What a loop leaves, after no turn, one or more: what it adds up and passes on shows at later ones."""
        found, held = given, dict(self.state)
        for _ in range(_MOST_TURNS):
            turned = self._run(body, found)
            joined = [_either_of(one, other) for one, other in zip(found, turned, strict=False)]
            states = {cell: (held.get(cell) or self._trace.of_variable(cell), self.state[cell]) for cell in self.state}
            self.state = {cell: _either_of(*units) for cell, units in states.items()}
            if joined == found and self.state == held:
                break
            found, held = joined, dict(self.state)
        return found

    def _branch(self, op: Any, bodies: list[Any], given: list[Any]) -> list[Any]:
        condition, key = whole_of(given[0]), id(op.inputs[0])
        before, states, outputs = self.state, [], []
        for place, body in enumerate(bodies):
            self.state = dict(before)
            outputs.append(self._run(body, [_of_branch(one, key, place) for one in given[first_argument(op) :]]))
            states.append(self.state)
        self.state = {}
        for cell in {cell for state in states for cell in state}:
            found = [state[cell] if cell in state else before.get(cell) for state in states]
            held = [self._trace.of_variable(cell) if unit is None else unit for unit in found]
            self.state[cell] = held[0] if all(unit is held[0] for unit in held) else beside(held)
        # Behind its own outputs are those for a backward pass, which have nothing in common.
        own = _count_tensors(bodies[0].structured_outputs)

        def chosen(place: int, units: tuple) -> Any:
            if not is_unit(units[0]):
                return units[0]
            whole = tuple(map(whole_of, units))
            if len(set(whole)) == 1 and is_plain(condition):
                return whole[0]
            return Either(key, whole, choice(condition, whole, op.name) if place < own else beside(whole))

        return [chosen(place, units) for place, units in enumerate(zip(*outputs, strict=False))]

    def _memory(self, op: Any, given: list[Any]) -> list[Any]:
        """What an operation on a variable, a queue or a table gives, and what is kept there after it."""
        if op.type.startswith("Iterator"):
            return list(map(self._trace.of_argument, op.outputs))
        if op.type.startswith(_BEGIN_MEMORIES):
            return _given_out(op)
        cell = next(unit for unit, one in zip(given, op.inputs, strict=True) if one.dtype == tf.resource)
        if not tf.is_tensor(cell):
            return [UNKNOWN] * len(op.outputs)  # Nothing tells which memory it is.
        rest = [unit for unit, one in zip(given, op.inputs, strict=True) if one.dtype.is_floating]
        held = self.state.get(id(cell))
        if held is None:
            held = self._trace.of_variable(id(cell))
        rest = list(map(_settled, rest))
        if op.type == "AssignVariableOp":
            self.state[id(cell)] = rest[0] if rest else ONE
        elif op.type.startswith(_ASSIGNS) and rest:
            self.state[id(cell)] = total([held, *rest], Why.SUM, op.name)
        return [held if one.dtype.is_floating else ONE for one in op.outputs]


_MOST_TURNS = 6
"""How often a loop is interpreted at most: what one of its variables passes on to the next shows one turn later."""
_UNITS = (Power, Mixed, Unknown, Special, Either)


def _given_out(op: Any) -> list[Unit]:
    """The units of what was put into a queue or a table, perhaps by an earlier call."""
    name = next(name for begin, name in _MEMORIES.items() if op.type.startswith(begin))
    return [Unknown(frozenset([Kept(id(op), name, is_variable=False)]))] * len(op.outputs)


def of_mark(tensor: tf.Tensor, before: Unit = UNKNOWN) -> Unit | None:
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


def _either_of(one: Any, other: Any) -> Any:
    """The unit of a value that is one of two, when it is not known which."""
    same = one is other or not is_unit(one) or not is_unit(other) or whole_of(one) == whole_of(other)
    return one if same else beside([whole_of(one), whole_of(other)])


def _settled(unit: Unit) -> Unit:
    """The unit of what goes on as a number by itself: the scales that cancelled in it are of no interest any more.

    Within a product they are: a derivative of a quotient is multiplied by what had divided it.
    """
    if not isinstance(unit, Power) or unit.powers or unit is ONE or unit is UNIT_OF_MODEL:
        return unit
    return Power(notes=_but(unit.notes, lambda one: bool(getattr(one, "owner", None)) and not one.owner.is_one))


def _stopped(unit: Unit) -> Unit:
    """The unit behind a `tf.stop_gradient`: a scaled loss is none there, only a number that is known to be scaled."""

    def is_loss(origin: Any) -> bool:
        return isinstance(origin, Source) and kind_of(origin.mark.deref()) == SCALED

    unit = _settled(unit)
    if isinstance(unit, Power):
        return unit if unit is ONE or unit is UNIT_OF_MODEL else Power(unit.powers, _but(unit.notes, is_loss))
    if isinstance(unit, Mixed):
        return unit._replace(of=frozenset(map(_stopped, unit.of)))
    return Unknown(_but(unit.of, is_loss)) if isinstance(unit, Unknown) else unit


def _but(origins: frozenset, leaves_out: Callable[[Any], bool]) -> frozenset:
    return frozenset(one for one in origins if not leaves_out(one))


def _outside(value: Any, bodies: Sequence[Any], call: Any) -> Any:
    """A unit as it is seen outside of functions: what was made inside of them comes from the call."""
    may_be_left_out = call.type in BRANCHES or call.type in LOOPS

    def seen(origin: Any) -> Any:
        if may_be_left_out and isinstance(origin, Kept):
            return origin._replace(share=Share.CHOICE)
        operation = getattr(origin, "operation", None)
        is_inside = operation is not None and any(operation.graph is body for body in bodies)
        return origin._replace(operation=call) if is_inside else origin

    if isinstance(value, Either):
        units = tuple(_outside(unit, bodies, call) for unit in value.units)
        return Either(value.condition, units, _outside(value.whole, bodies, call))
    return mapped(value, seen) if is_unit(value) and value is not ONE and value is not UNIT_OF_MODEL else value


def is_unit(value: Any) -> bool:
    """Whether it is a unit, and not the handle of a memory."""
    return isinstance(value, _UNITS)


def _is_of_scales_alone(unit: Any) -> bool:
    """Whether a factor is made of scales and constants."""
    known = isinstance(unit, Power) and bool(unit.powers)
    return known and not unit.notes & {Note.UNSCALED, Note.CANCELLED, Note.MODEL, Note.DOUBTFUL}


def whole_of(value: Any) -> Any:
    """What it is for everybody but the branches of its condition."""
    return value.whole if isinstance(value, Either) else value


def _of_branch(value: Any, condition: int, place: int) -> Any:
    if isinstance(value, Either):
        return value.units[place] if value.condition == condition else value.whole
    return value


def _count_tensors(structure: Any) -> int:
    """How many tensors a structure holds, also where a branch gives replicas their shares of a batch."""
    leaves = tf.nest.flatten(structure)
    shares = [one.values if isinstance(one, tf.distribute.DistributedValues) else one for one in leaves]
    return len(tf.nest.flatten(shares, expand_composites=True))
