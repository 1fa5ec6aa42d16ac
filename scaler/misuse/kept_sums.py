"""Gradients of an earlier step, perhaps of another scale: added to what a variable kept, or out of a queue or a table.

Which assignments a step makes is known when its trace ends: `look_at_end` looks then, at all of it. Eager mode has
no graph to look at. What was put into a queue, and when, is not in the graph. What Python keeps behind a
`tf.py_function` is not seen at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from scaler.backend.assignments import assigns, at_end_of_trace, is_function, is_loop_body, is_one_of
from scaler.backend.graphs import functions_called, graphs_around, is_eager, variables_read
from scaler.backend.replicas import native, replica_count
from scaler.errors import InvalidArgument
from scaler.misuse.carried import KEEP_UNSCALED, TO_APPLY
from scaler.misuse.contents import (
    CALLS,
    CHOICE,
    PART,
    Content,
    Contents,
    Held,
    Source,
    Value,
    held_at_first,
    rescales,
)
from scaler.misuse.marks import LOSS_SCALE, READ, kind_of, owner_of_scale
from scaler.misuse.sources import edges_upstream
from scaler.misuse.units import Kept, Unit, origins_of, sources_of


def look_at_end(
    method: str,
    gradients: Sequence,
    targets: Sequence,
    owner: object,
    always: bool,
    now: Any,
    say_once: Callable[[str, str], None],
) -> None:
    """Looks, when the trace of the step ends, at what its gradients take over from earlier calls.

    A step is the body of the innermost loop, or else the outermost function that is known to lead here.

    Args:
        method: Who asks, for the sentences.
        gradients: The values of scaled gradients.
        targets: The variables to update. They hold no gradients.
        owner: The `Calls` of the loss scaler.
        always: Whether every call of the step takes these gradients.
        now: The variable that holds the scale of the next loss.
        say_once: Gives a warning, once for all of the same mistake.
    """
    values = [value for value in gradients if not is_eager(value)]
    graphs: list[Any] = []
    for graph in filter(is_function, graphs_around()):
        graphs.append(graph)
        if is_loop_body(graph):
            break
    if not values or not graphs:
        return
    replica_is_one = replica_count() == 1
    handled = sys.exc_info()[1]

    def look() -> None:
        # An error that ends the trace says enough.
        if sys.exc_info()[1] is not handled:
            return
        calls = _calls_of(graphs)
        starts = [Value(value.ref(), calls[value.graph]) for value in values if value.graph in calls]
        step = _Step(starts, owner)
        plain = replica_is_one and all(call.type in CALLS for call, _ in calls[graphs[0]])
        for first, last in step.carried_by(graphs[-1]) if assigns(graphs[-1], now) else ():
            if step.is_kept(first, last) and step.wrong(first, last, always and plain):
                raise InvalidArgument(
                    f"{method}(grads): a loop carries scaled gradients from one pass to the next, as a momentum does, "
                    "and the loss scale moves between the passes, so that no single scale divides the sum: expected "
                    f"gradients of losses that one scale multiplied. {KEEP_UNSCALED}"
                )
        for kept in step.kept([native(target) for target in targets]):
            name, wrong = _name(kept), step.wrong(kept, Held(kept.handle, ()), always and plain)
            if wrong and replica_is_one:
                raise InvalidArgument(
                    f"{method}(grads): {name} keeps scaled gradients from call to call, {wrong}. The loss scale moves "
                    "between the calls, so that no single scale divides the sum: expected gradients of losses that one "
                    f"scale multiplied. {KEEP_UNSCALED}"
                )
            say_once(
                f"{method}(grads): {name} sums scaled gradients over several calls, and the scale of the last loss "
                "divides them all. This is right only while the loss scale does not move inside of a window. To be "
                f"sure, sum what unscale(grads) returns, and pass the sums to {TO_APPLY}.",
                "a sum of scaled gradients",
            )

    at_end_of_trace(graphs[-1], look)


def _calls_of(graphs: Sequence[Any]) -> dict[Any, tuple]:
    """The calls by which the outermost of these graphs reaches each of them.

    Graphs around one that none of them seems to call are left out.
    """
    links: list[tuple] = []
    for inner, outer in pairwise(graphs):
        call = next((op for op in outer.get_operations() if any(one is inner for one in functions_called(op))), None)
        if call is None:
            break
        links.append((call, inner))
    return {graph: tuple(links[place:][::-1]) for place, graph in enumerate(graphs[: len(links) + 1])}


class _Step:
    """What one step takes over from an earlier call.

    Args:
        starts: Its gradients.
        owner: The `Calls` of the loss scaler.
    """

    def __init__(self, starts: Sequence[Value], owner: object):
        self._starts, self._owner = starts, owner
        self._contents = Contents()
        self._upstream = self._contents.follow(starts)
        self._scaled: dict[Value, bool | None] = {}

    def kept(self, targets: Sequence) -> list[Held]:
        """What variables held before this call, if the gradients hold it and each call leaves scaled gradients."""
        first = [one for one in self._upstream if isinstance(one, Held) and one == held_at_first(one.handle)]
        return [
            one
            for one in first
            if not is_one_of(one.handle.deref(), targets) and self.is_kept(one, Held(one.handle, ()))
        ]

    def carried_by(self, graph: Any) -> list[tuple[Content, Content]]:
        """What a loop carries that the gradients come from, at the beginning and at the end of a pass."""
        if not is_loop_body(graph):
            return []
        pairs = [
            (Value(own.ref(), ()), Value(left.ref(), ()))
            for own, left in zip(graph.inputs, graph.outputs, strict=False)
        ]
        return [(first, last) for first, last in pairs if first in self._upstream]

    def is_kept(self, first: Content, last: Content) -> bool:
        """Whether the gradients hold what was there at first, and scaled gradients are there at last."""
        left = self._contents.follow([last])
        if first in left and len(left) <= 2:
            return False
        if last not in self._contents.holding(self._scaled_of(left), left, self._is_whole):
            return False
        holding = self._contents.holding({first}, self._upstream, self._is_taken)
        return any(start in holding for start in self._starts) and (first in left or self._takes_new(holding))

    def _takes_new(self, holding: set[Content]) -> bool:
        """Whether gradients that hold what was kept hold gradients of this call, too."""
        new = self._contents.holding(self._scaled_of(self._upstream), self._upstream, self._is_whole)
        return any(start in holding and start in new for start in self._starts)

    def wrong(self, first: Content, last: Content, always: bool) -> str | None:
        """Why this is no sum of a window's micro-batches, or None if it may be one."""
        left = self._contents.follow([last])
        if first not in left:
            return "and adds the last call's to those of this one" if always else None
        holding = self._contents.holding({first}, left, self._is_taken)
        met = self._contents.shares(last, first, holding, self._is_taken)
        return "as a momentum or an average does, times a constant" if PART in met and CHOICE not in met else None

    def _scaled_of(self, contents: Iterable[Content]) -> set[Content]:
        """Those of these contents that nothing is followed behind, and that carry the scale."""
        ends = [one for one in contents if isinstance(one, Value) and not self._contents.sources[one]]
        ends = [one for one in ends if not kind_of(one.tensor.deref())]
        self._find_scaled(ends)
        return {one for one in ends if self._scaled[one]}

    def _is_whole(self, content: Content, source: Source) -> bool:
        """Whether a source still carries the scale in a product: not if the factor does, as an inverse norm."""
        return source.factor is None or not self._carries(source.factor)

    def _is_taken(self, content: Content, source: Source) -> bool:
        """Whether a product takes a sum over: not one of a weight and a gradient, but one with a factor that clips."""
        if source.factor is None or not self._carries(source.factor):
            return True
        factor, taken = source.factor.tensor.deref(), source.content
        return factor.shape.rank == 0 and isinstance(taken, Value) and taken.tensor.deref().shape.rank != 0

    def _carries(self, value: Value) -> bool:
        self._find_scaled([value])
        return bool(self._scaled[value])

    def _find_scaled(self, values: Iterable[Value]) -> None:
        """Finds which values depend on a scale of the owner that nothing divides them by."""
        nodes = [(one.tensor.deref(), one.calls) for one in values if self._scaled.setdefault(one, None) is None]
        users: dict[Value, list[Value]] = {}
        waiting = []
        for (tensor, calls), sources in edges_upstream(nodes, lambda one: kind_of(one) or rescales(one)):
            value = Value(tensor.ref(), calls)
            is_own = kind_of(tensor) in (LOSS_SCALE, READ) and owner_of_scale(tensor) is self._owner
            if is_own or self._scaled.get(value):
                waiting.append(value)
            self._scaled[value] = False
            for source, inner in sources:
                users.setdefault(Value(source.ref(), inner), []).append(value)
        while waiting:
            value = waiting.pop()
            if not self._scaled[value]:
                self._scaled[value] = True
                waiting += users.get(value, ())


def _name(kept: Held) -> str:
    variable = variables_read(kept.handle.deref().graph).get(kept.handle)
    return "a variable" if variable is None else f"the variable {variable.name!r}"


def kept_elsewhere(method: str, units: Sequence[Unit]) -> str | None:
    """Returns a warning if a gradient comes out of a queue or the like, and from no loss in this graph, else None.

    A forward pass may look up values in a table, too: its gradients come from a loss.

    Args:
        method: Who asks.
        units: Those of the gradients.
    """
    origins = (origin for unit in units if not sources_of(unit) for origin in origins_of(unit))
    memory = next((origin.name for origin in origins if isinstance(origin, Kept) and not origin.is_variable), None)
    if memory is None:
        return None
    return (
        f"{method}(grads): a gradient comes out of {memory}, and nothing tells which loss it belongs to. The scale of "
        f"the last loss divides it, and it may carry that of an earlier step. {KEEP_UNSCALED}"
    )
