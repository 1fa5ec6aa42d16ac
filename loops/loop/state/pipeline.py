"""What a saved position in a dataset does not restore, found in the dataset's operations before the first step."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from loops.backend.datasets import argument, functions, inputs, unsaid
from loops.loop.state.operations import (
    OPERATIONS,
    REPEATS,
    Memory,
    Node,
    captured,
    draws,
    hidden,
    holds_state,
    kind,
    nodes,
    order,
    spelled,
    started_again,
)


@dataclasses.dataclass
class Findings:
    """What was found in a pipeline.

    Attributes:
        problem: Why its position must not be saved, although TensorFlow would save it, and what to do; None if it may.
        unseeded: Operations that draw random numbers without a seed.
        unseeded_again: Those of them that do so again after the position was restored.
        unordered: Operations that give elements in the order in which they are ready.
        unknown: Operations that are not in the table of `operations`.
        ignored: Operations whose state the dataset's options ignore.
        unsaid: What the installed TensorFlow hides, such as "inputs of map".
    """

    problem: str | None = None
    unseeded: set[str] = dataclasses.field(default_factory=set)
    unseeded_again: set[str] = dataclasses.field(default_factory=set)
    unordered: set[str] = dataclasses.field(default_factory=set)
    unknown: set[str] = dataclasses.field(default_factory=set)
    ignored: set[str] = dataclasses.field(default_factory=set)
    unsaid: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Draw:
    """An operation that draws random numbers, as seen from an operation above it.

    Attributes:
        source: The identity of the operation.
        kind: Its name.
        unseeded: Whether it has no seed.
        redraws: Whether it draws other numbers each time it starts.
        cached: Whether a cache in memory holds what it drew.
        drained: Whether an operation above releases it once that operation's end has been read.
        culprit: The operation that releases it, or None.
    """

    source: int
    kind: str
    unseeded: bool
    redraws: bool
    cached: bool = False
    drained: bool = False
    culprit: str | None = None


def look(dataset: tf.data.Dataset) -> Findings:
    """Examines every operation of a dataset, including those in the functions that they call."""
    return _Walk(dataset).found


def redrawing(dataset: tf.data.Dataset) -> list[str]:
    """The operations that draw other random numbers each time the dataset starts."""
    draws = _Walk(dataset).above[id(dataset)]
    return sorted({spelled(draw.kind) for draw in draws if draw.redraws and not draw.cached})


def operations_called(dataset: tf.data.Dataset) -> set[str]:
    """The kinds of operations in the functions of a dataset."""
    called = (function for part in bottom_up(dataset) for function in functions(part))
    return {node.op for function in called for node in nodes(function.graph.as_graph_def())}


class _Walk:
    """A walk over a dataset's operations.

    Attributes:
        found: What was found.
        above: By identity of an operation, the draws that are seen from above it.
    """

    def __init__(self, dataset: tf.data.Dataset):
        options = dataset.options()
        self.found = Findings()
        self.above: dict[int, tuple[_Draw, ...]] = {}
        policy = options.experimental_external_state_policy
        self._ignores = policy not in (None, tf.data.experimental.ExternalStatePolicy.FAIL)
        self._unordered = {"false"} | ({"default"} if options.deterministic is False else set())
        for part in bottom_up(dataset):
            self._visit(part)

    def _visit(self, dataset: Any) -> None:
        """Examines one operation. Its inputs must have been visited before."""
        name = type(dataset).__name__
        what = kind(name) or name
        memory = OPERATIONS.get(what)
        self._look_at(what, memory, order(dataset, what))
        if memory is not None:
            hides = unsaid(dataset, what, is_source=memory is Memory.SOURCE)
            self.found.unsaid |= {f"{part} of {spelled(what)}" for part in hides}
        if what == "Cache" and argument(dataset, "filename", b""):
            self.found.problem = self.found.problem or _files("cache in a file")
        if _selects_for_ever(dataset, what):
            self.found.problem = self.found.problem or (
                "a saved iterator over sample_from_datasets can hang once all of its datasets have ended. Repeat each "
                "of them, sample_from_datasets([one.repeat(), other.repeat()], ...), to lose nothing"
            )
        below = [self.above[id(part)] for part in inputs(dataset)]
        found = tuple(dict.fromkeys(draw for part in below for draw in part))
        for draw in found if _starts_again(dataset, what) else _shared(below, what):
            self._start_again(draw, what)
        if what == "Concatenate":  # Its later inputs start when the first has ended.
            self.found.unseeded_again |= {spelled(draw.kind) for part in below[1:] for draw in part if draw.unseeded}
        found = tuple(_above(draw, what, memory) for draw in found)
        own = draws(dataset, what)
        if own:
            found += (_Draw(id(dataset), what, *own),)
            self.found.unseeded |= {spelled(what)} if own[0] else set()
            self.found.unseeded_again |= {spelled(what)} if own[0] and what == "ShuffleAndRepeat" else set()
        found += self._hidden(dataset)
        self.above[id(dataset)] = found
        for function in functions(dataset):
            self._enter(function, what)

    def _hidden(self, dataset: Any) -> tuple[_Draw, ...]:
        inside = hidden(dataset)
        names = started_again(inside)
        for node in inside:
            self._look_inside(node, again=node.in_function or node.name in names)
        lost = next((node.kind for node in inside if OPERATIONS.get(str(node.kind)) is Memory.LETS_GO), None)
        drawing = [node for node in inside if node.unseeded or node.redraws]
        return tuple(_Draw(id(node), str(node.kind), node.unseeded, node.redraws, culprit=lost) for node in drawing)

    def _start_again(self, draw: _Draw, restart: str) -> None:
        if draw.unseeded and (draw.culprit or not draw.cached):
            self.found.unseeded_again.add(spelled(draw.kind))
        if draw.redraws and draw.culprit:
            self.found.problem = self.found.problem or _forgotten(draw, spelled(restart))

    def _enter(self, function: Any, what: str) -> None:
        for node in nodes(function.graph.as_graph_def()):
            self._look_inside(node)
        for node in captured(function):
            self._look_inside(node)
            if node.redraws:
                self.found.problem = self.found.problem or _outside(node, spelled(what))

    def _look_inside(self, node: Node, *, again: bool = True) -> None:
        """Examines an operation of a function, which starts with each call, or a hidden one."""
        if self._ignores and holds_state(node.op):
            self.found.ignored.add(node.op)
        if node.kind:
            self._look_at(node.kind, OPERATIONS.get(node.kind), node.deterministic)
        if node.unseeded:
            self.found.unseeded.add(spelled(str(node.kind)))
            self.found.unseeded_again |= {spelled(str(node.kind))} if again else set()

    def _look_at(self, what: str, memory: Memory | None, deterministic: str) -> None:
        if memory is None:
            self.found.unknown.add(what)
        if memory is Memory.FILES:
            self.found.problem = self.found.problem or _files(spelled(what))
        if deterministic in self._unordered:
            self.found.unordered.add(spelled(what))


def surely_endless(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset's cardinality is infinite, and certainly so.

    The cardinality of a filter or a generator is unknown. Repeated, it counts as infinite, but it may give nothing when
    it starts again, and then the dataset ends.
    """
    sizes = [int(part.cardinality()) for part in bottom_up(dataset)]
    return sizes[-1] == tf.data.INFINITE_CARDINALITY and tf.data.UNKNOWN_CARDINALITY not in sizes


def bottom_up(dataset: Any) -> list:
    """A dataset and all of its inputs, each once, inputs first; pipelines may be deeper than Python's stack."""
    order: dict[int, Any] = {}
    stack = [(dataset, False)]
    while stack:
        part, ready = stack.pop()
        if id(part) in order:
            continue
        if ready:
            order[id(part)] = part
        else:
            stack.append((part, True))
            stack += [(below, False) for below in inputs(part)]
    return list(order.values())


def _starts_again(dataset: Any, what: str) -> bool:
    """Whether the operation restarts its input when that ends."""
    if what not in REPEATS or argument(dataset, "count") == 1:
        return False
    return any(int(part.cardinality()) != tf.data.INFINITE_CARDINALITY for part in inputs(dataset))


def _above(draw: _Draw, what: str, memory: Memory | None) -> _Draw:
    """The draw as seen from above the operation `what`."""
    if what == "Cache":
        return dataclasses.replace(draw, cached=True, drained=False, culprit=None)
    if memory is Memory.DRAINS:
        return dataclasses.replace(draw, drained=True)
    if draw.culprit or memory is Memory.KEEPS or (memory is Memory.AHEAD and not draw.drained):
        return draw
    return dataclasses.replace(draw, culprit=f"Shuffle and {what}" if draw.drained else what)


def _selects_for_ever(dataset: Any, what: str) -> bool:
    """Whether an endless selector chooses from datasets that all end."""
    if what != "DirectedInterleave":
        return False
    selector = inputs(dataset)[0]
    endless = tf.data.INFINITE_CARDINALITY
    return int(selector.cardinality()) == endless and int(dataset.cardinality()) != endless


def _shared(below: list[tuple[_Draw, ...]], what: str) -> list[_Draw]:
    """The draws that are below several inputs: they end in one and start again in another."""
    if what not in ("Concatenate", "DirectedInterleave"):
        return []
    held = [{draw.source for draw in part} for part in below]
    return [draw for part in below for draw in part if sum(draw.source in one for one in held) > 1]


def _forgotten(draw: _Draw, restart: str) -> str:
    source = spelled(draw.kind)
    if draw.kind == "Random":
        return (
            f"with {spelled(str(draw.culprit))} between random and {restart}, TensorFlow forgets what later epochs "
            "draw. Draw with tf.random.stateless_uniform, seeded by tf.data.Dataset.counter(), to lose nothing"
        )
    return (
        f"with {spelled(str(draw.culprit))} between {source} and {restart}, TensorFlow forgets how later epochs are "
        "shuffled. Repeat right after the shuffle, .shuffle(n, seed=0).repeat().batch(...), to lose nothing"
    )


def _outside(node: Node, function: str) -> str:
    return (
        f"{spelled(str(node.kind))} is in a dataset that was made outside of a function, that of {function}, and starts"
        " with each of its calls: TensorFlow forgets what later ones draw. Make that dataset without it to lose nothing"
    )


def _files(what: str) -> str:
    return (
        f"{what} writes files during the run, and a saved iterator does not match later versions of them. Write them "
        "in a separate program, and read them here, to lose nothing"
    )
