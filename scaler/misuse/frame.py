"""The units of the tensors of one graph: its operations, interpreted once, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.graphs import BRANCHES, CALLS, LOOPS, carries, first_argument, functions_called, is_eager
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
    is_plain,
    mapped,
    total,
    unknown,
)

_LOOKED_AT = frozenset(
    (
        *("Identity", "Sub", "ZerosLike", "OnesLike", "TensorListReserve", "EmptyTensorList", "OptionalNone"),
        *("PyFunc", "PyFuncStateless", "EagerPyFunc", "Bitcast", "ParseTensor", "DecodeRaw", "StringToNumber", *CALLS),
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
        self._interpret(operations[self._position :])
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
        found = self._values.get(id(tensor))
        if found is None:
            if is_eager(tensor):
                return of_mark(tensor) or unit_of_constant(tensor)
            # Else it was left out, or not all of its graph is interpreted yet.
            found = self._given(tensor) if tensor.op.type == "Placeholder" else of_mark(tensor) or UNKNOWN
            self._values[id(tensor)] = found
        return found

    def _interpret(self, operations: Iterable[Any]) -> None:
        """Finds the units of what operations make, in their order, unless they are known."""
        values, trace = self._values, self._trace
        for op in operations:
            kind = op.type
            if kind == "Placeholder" or op in self._entered or op in trace.own:
                continue
            self._entered.add(op)
            if kind == "Const":
                (output,) = op.outputs
                values[id(output)] = unit_of_constant(output) if output.dtype.is_floating else ONE
                continue
            given: list[Any] = []
            plain, of_model, memory = kind not in _LOOKED_AT, False, False
            for one in op.inputs:
                unit = values.get(id(one))
                if unit is None:
                    # A loop that was differentiated stacks its values on lists that were made after it.
                    if one.op.type != "Placeholder":
                        self._interpret([one.op])
                    unit = self.value(one)
                if isinstance(unit, Either) and kind not in BRANCHES:
                    unit = unit.whole
                if unit is UNIT_OF_MODEL:
                    of_model = True
                elif unit is not ONE:
                    plain = False
                memory = memory or one.dtype == tf.resource
                given.append(unit)
            if plain and given:
                for output in op.outputs:
                    values[id(output)] = UNIT_OF_MODEL if of_model else ONE
                continue
            found: Sequence[Any]
            if kind in CALLS:
                found = self._call(op, given)
            elif kind.startswith(_BEGIN_MEMORIES):
                # What was put in there, perhaps by an earlier call.
                name = next(name for begin, name in _MEMORIES.items() if kind.startswith(begin))
                found = [Unknown(frozenset([Kept(id(op), name, is_variable=False)]))] * len(op.outputs)
            elif memory:
                found = self._memory(op, given)
            elif kind == "Identity":
                marked = of_mark(op.outputs[0], given[0])
                if marked is not None:
                    # A loop that is differentiated keeps what stands before an identity.
                    values[id(op.inputs[0])] = marked
                found = [marked or given[0]]
            elif kind == "StopGradient":
                found = [_stopped(given[0])]
            else:
                found = units_of_results(op, given, trace.products)
            if trace.held_on is not None:
                units = [one if not is_unit(one) else whole_of(one) for one in given]
                found = [trace.held_on(op, units, unit) if is_unit(unit) else unit for unit in found]
            # A function that was traced before it is differentiated shows what its later form returns, too, at the end.
            for output, unit in zip(op.outputs, found, strict=False):
                # Masks, indices and counts are of no gradient, whatever decided about them.
                is_free = isinstance(unit, Unknown) and not (output.dtype.is_floating or carries(output))
                values[id(output)] = UNKNOWN if is_free else unit

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
        cells, rest = [], []
        for unit, one in zip(given, op.inputs, strict=True):
            if one.dtype == tf.resource:
                cells.append(unit)
            elif one.dtype.is_floating:
                rest.append(_settled(unit))
        if not tf.is_tensor(cells[0]):
            return [UNKNOWN] * len(op.outputs)  # Nothing tells which memory it is.
        cell = id(cells[0])
        held = self.state.get(cell)
        if held is None:
            held = self._trace.of_variable(cell)
        if op.type == "AssignVariableOp":
            self.state[cell] = rest[0] if rest else ONE
        elif op.type.startswith(_ASSIGNS) and rest:
            self.state[cell] = total([held, *rest], Why.SUM, op.name)
        return [held if one.dtype.is_floating else ONE for one in op.outputs]


_MOST_TURNS = 6
"""How often a loop is interpreted at most: what one of its variables passes on to the next shows one turn later."""
_UNITS = (Power, Mixed, Unknown, Special, Either)


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
        return mapped(before, lambda notes: notes | {source})
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
    others = [one for one in unit.notes if not getattr(one, "owner", None) or one.owner.is_one]
    return Power(notes=frozenset(others))


def _stopped(unit: Unit) -> Unit:
    """The unit behind a `tf.stop_gradient`: a scaled loss is none there, only a number that is known to be scaled."""
    if isinstance(unit, Mixed):
        return unit._replace(of=frozenset(map(_stopped, unit.of)))
    unit = _settled(unit)
    if unit is ONE or unit is UNIT_OF_MODEL:
        return unit

    def left(origins: frozenset) -> Iterable:
        return [one for one in origins if not isinstance(one, Source) or kind_of(one.mark.deref()) != SCALED]

    return mapped(unit, left)


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
    if not is_unit(value) or value is ONE or value is UNIT_OF_MODEL:
        return value
    return mapped(value, lambda origins: map(seen, origins))


def is_unit(value: Any) -> bool:
    """Whether it is a unit, and not the handle of a memory."""
    return isinstance(value, _UNITS)


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
