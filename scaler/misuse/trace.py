"""What is known of a trace while it runs: the units of all tensors of the outermost function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import graphs_around, is_eager, outermost_function, variables_read
from scaler.backend.variables import is_of_a_scaler
from scaler.misuse.frame import UNIT_OF_MODEL, Frame, is_unit, of_mark, whole_of
from scaler.misuse.marks import RETRIED, kind_of
from scaler.misuse.operations import unit_of_constant
from scaler.misuse.units import ONE, UNKNOWN, Kept, Note, Power, Unit, Unknown, sources_of

_TRACE = "halfstep_trace"
_UNIT_DOUBTFUL = Power(notes=frozenset([Note.DOUBTFUL]))


class Trace:
    """The units of all tensors that the outermost function has traced so far.

    Args:
        graph: That of the function.

    Attributes:
        own: Operations that are left out.
        products: The units of products, by how they are made: most operations of a step repeat those of others.
        unscaled: What each call of `unscale` was given whose variables are not known yet, and by which scaler.
        applied: What was applied: in which graph, gradients with variables, their scale, and whether that was counted.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.unscaled: list[tuple[object, Sequence]] = []
        self.applied: list[tuple[Any, frozenset[tuple], Any, bool]] = []
        self._frames: dict[int, Frame] = {}
        self._weights: set[int] = set()
        self._variables: dict[int, Any] = {}
        self._shapes: set[tuple] = set()
        self._supposed: Mapping[int, Unit] = {}
        self._watched: dict[int, Unit] = {}
        self._number: Unit = UNKNOWN
        self.held_on: Callable[[Any, Sequence[Any], Unit], Unit] | None = None
        self.own: set[Any] = set()
        self.products: dict[tuple, Unit] = {}

    def units(self, tensors: Sequence[tf.Tensor], weights: Iterable = ()) -> list[Unit]:
        """The units of tensors of the graph that is being traced, or of those around it.

        Args:
            tensors: The tensors.
            weights: The trained variables of the model, which carry no scale.
        """
        handles, shapes = set(), set()
        for own in map(replicas.native, weights):
            shapes.add(tuple(own.shape))
            # A variable of several replicas has no handle of its own.
            handles.update([id(part.handle) for part in getattr(own, "values", (own,)) if hasattr(part, "handle")])
        if not handles <= self._weights:
            self._weights |= handles
            self._shapes |= shapes
            self._frames = {}
        here = self._frame(tf.compat.v1.get_default_graph())
        # Inside of a branch or a loop they may be tensors of a graph around it.
        frames = [self._frames.get(id(getattr(one, "graph", None)), here) for one in tensors]
        return [whole_of(frame.value(one)) for frame, one in zip(frames, tensors, strict=True)]

    def again(
        self,
        graph: Any,
        supposed: Mapping[int, Unit],
        tensors: Sequence[tf.Tensor],
        held_on: Callable[[Any, Sequence[Any], Unit], Unit],
    ) -> tuple[list[Unit], dict[int, Unit]]:
        """Interprets a function once more, by what its memories and arguments are supposed to hold at first.

        Numbers from elsewhere count as plain: one that unscales would not be passed on as scaled.

        Args:
            graph: Of the function.
            supposed: Units, by the identity of the handle or the argument.
            tensors: What else is asked for, of this graph and those that it calls.
            held_on: Changes the unit of a result, given the operation and the units of its inputs.

        Returns:
            The units of these tensors, unknown where nothing reaches them, and those at last: of each memory that was
            assigned, and of the argument that the next pass of a loop gets.
        """
        given = _of_open_graph(self, graph, None if graph is self._graph else self._frame(graph.outer_graph))
        self._supposed, self._watched, self.held_on, self._number = supposed, {}, held_on, ONE
        try:
            frame = Frame(self, graph, lambda inner: supposed.get(id(inner)) or given(inner), {})
            outputs = frame.outputs()
            last = {id(inner): whole_of(unit) for inner, unit in zip(graph.inputs, outputs, strict=False)}
            known = {**supposed, **self._watched}  # An argument may be asked for as it is.
            return [known.get(id(one), UNKNOWN) for one in tensors], {**last, **frame.state}
        finally:
            self._supposed, self._watched, self.held_on, self._number = {}, {}, None, UNKNOWN

    def watch(self, values: Mapping[int, Any]) -> None:
        """Takes the units that were found in one call of a function, while it interprets a function again."""
        self._watched.update((key, whole_of(unit)) for key, unit in values.items() if is_unit(unit))

    def leave_out(self, graph: Any, since: int) -> None:
        """Leaves out the operations of a graph that were added after so many."""
        self.own.update(graph.get_operations()[since:])

    def of_variable(self, handle: int) -> Unit:
        """The unit of what a variable holds at first. It may be a scale, or another function filled it with gradients.

        Args:
            handle: The identity of its handle, as the outermost function captured it.
        """
        if handle in self._weights:
            return UNIT_OF_MODEL
        if handle in self._supposed:
            return self._supposed[handle]
        if handle not in self._variables:
            for graph in dict.fromkeys((self._graph, *graphs_around())):
                for one in map(replicas.native, variables_read(graph).values()):
                    for part in getattr(one, "values", (one,)):
                        self._variables[id(getattr(part, "handle", None))] = part
        variable = self._variables.get(handle)
        if variable is None or is_of_a_scaler(variable):
            return UNKNOWN
        kept = Kept(handle, f"the variable {variable.name!r}", is_number=variable.shape.rank == 0)
        if variable.shape.rank in (0, None):
            return Unknown(frozenset([kept])) if self._number is UNKNOWN else self._number
        return Power(notes=frozenset([Note.DOUBTFUL, kept]))

    def of_argument(self, tensor: tf.Tensor) -> Any:
        """The unit of an argument of a function that is being traced: data, or perhaps a scale or gradients."""
        if tensor.dtype == tf.resource:
            return tensor
        if not tensor.dtype.is_floating:
            return self._number if tensor.dtype == tf.variant else ONE
        shape = tensor.shape
        if shape.rank in (0, None):
            return self._number  # A scale, or its inverse.
        return _UNIT_DOUBTFUL if self._may_be_gradients(shape) else ONE

    def _may_be_gradients(self, shape: tf.TensorShape) -> bool:
        """Whether an argument may be a gradient, several of one weight, or all in one tensor."""
        dims = tuple(shape)
        if not any(dims) or (shape.rank == 1 and shape.is_fully_defined()) or dims in self._shapes:
            return True
        return shape.rank > 2 and dims[1:] in self._shapes

    def _frame(self, graph: Any) -> Frame:
        """What is known of a graph that is being traced."""
        found = self._frames.get(id(graph))
        if found is None:
            outer = None if graph is self._graph else self._frame(graph.outer_graph)
            state = {} if outer is None else dict(outer.up_to_now().state)
            found = self._frames[id(graph)] = Frame(self, graph, _of_open_graph(self, graph, outer), state)
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
    return [of_mark(tensor) or UNKNOWN for tensor in tensors] if trace is None else trace.units(tensors, weights)


def kinds_behind(tensors: Sequence[Any]) -> set[str]:
    """The kinds of the marks that tensors come from. In eager mode only a tensor's own mark is known."""
    return {kind_of(source.mark.deref(), (RETRIED,)) or "" for source in sources_of(units_of(tensors))}


@contextlib.contextmanager
def not_judged() -> Iterator[None]:
    """What is traced inside is a step's own doing, which no user can get wrong: its results count as unknown."""
    graph, trace = tf.compat.v1.get_default_graph(), trace_here()
    since = 0 if trace is None else len(graph.get_operations())
    yield
    if trace is not None:
        trace.leave_out(graph, since)


def _of_open_graph(trace: Trace, graph: Any, outer: Frame | None) -> Callable[[tf.Tensor], Any]:
    """What gives the units of the inputs of a graph that is being traced."""
    captured: dict[int, Any] = {}
    seen = 0

    def given(inner: tf.Tensor) -> Any:
        nonlocal captured, seen
        if len(graph.inputs) != seen:
            captured, seen = {id(own): source for source, own in getattr(graph, "captures", ())}, len(graph.inputs)
        source = captured.get(id(inner))
        if source is None:
            return trace.of_argument(inner)
        if inner.dtype == tf.resource:
            return source if outer is None or is_eager(source) else outer.value(source)
        if not is_eager(source):
            return ONE if outer is None else outer.value(source)
        # A vector of unknown origin may hold gradients.
        return UNKNOWN if inner.shape.rank == 1 and inner.dtype.is_floating else unit_of_constant(source)

    return given
