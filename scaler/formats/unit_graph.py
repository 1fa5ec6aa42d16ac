"""What unit scaling has to know of a model's graph: edges that cut it, and branches that are added back.

A factor of the pass back may differ from that of the pass forward where an edge cuts the graph in two: then all that
lies before it has the same constant on its gradients. Elsewhere paths of different constants would be added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scaler.backend.functional import Call


class Place(NamedTuple):
    """What a call's place in the graph says.

    Attributes:
        free: Whether its pass back may have another factor than its pass forward.
        into_branch: The factor on the gradient of its inputs, as the entry of a branch; 1 elsewhere.
        parts: Of a sum, the factor of each input; empty for other calls.
        delayed: Of a sum, whether the gradient of each input is multiplied at the entry of its branch, not here.
    """

    free: bool
    into_branch: float = 1.0
    parts: tuple[float, ...] = ()
    delayed: tuple[bool, ...] = ()


def places(calls: Sequence[Call], outputs: Sequence[int], is_sum: Callable[[Call], bool]) -> list[Place]:
    """The place of each call.

    The sum of a branch and of what it leaves aside is a running mean, so that all branches weigh the same: the k-th has
    the variance 1 / (1 + k). Its factor on gradients stands at the entry of the branch, so that they have unit variance
    within it. Other sums weigh their inputs alike.

    Args:
        calls: Each behind those that it depends on.
        outputs: The places of those that make the outputs.
        is_sum: Whether a call is a sum.
    """
    cutting = _cutting(calls, outputs)
    found = [Place(len(call.sources) == 1 and (call.sources[0], at) in cutting) for at, call in enumerate(calls)]
    above = _ancestors(calls)
    for at, call in enumerate(calls):
        if not is_sum(call):
            continue
        count = len(call.sources)
        found[at] = found[at]._replace(parts=(count**-0.5,) * count, delayed=(False,) * count)
        branch = _branch(calls, outputs, above, at)
        if branch is None:
            continue
        share = 1 / (2 + sum(is_sum(calls[each]) for each in above[branch.beside] | {branch.beside}))
        parts = {branch.beside: math.sqrt(1 - share), branch.end: math.sqrt(share)}
        found[at] = found[at]._replace(
            parts=tuple(parts[each] for each in call.sources),
            delayed=tuple(each == branch.end for each in call.sources),
        )
        for entry in branch.entries:
            found[entry] = found[entry]._replace(into_branch=found[entry].into_branch * math.sqrt(share))
    return found


class _Branch(NamedTuple):
    """A part of the graph from one call to a sum, where it is added to that call's own output.

    Attributes:
        beside: The call whose output goes around the branch.
        end: The last call of the branch.
        entries: The calls of the branch that are given that output.
    """

    beside: int
    end: int
    entries: list[int]


def _branch(calls: Sequence[Call], outputs: Sequence[int], above: list[set[int]], at: int) -> _Branch | None:
    sources = calls[at].sources
    if len(sources) != 2 or sources[0] == sources[1]:
        return None
    beside, end = sources if sources[0] in above[sources[1]] else sources[::-1]
    if beside not in above[end]:
        return None
    inside = {end} | {each for each in above[end] if beside in above[each]}
    entries = [each for each in sorted(inside) if beside in calls[each].sources]
    given = all(set(calls[each].sources) <= inside | {beside} for each in inside)
    kept = not inside & set(outputs) and not any(
        inside & set(call.sources) for place, call in enumerate(calls) if place != at and place not in inside
    )
    # A call that is also given something from within the branch would have that multiplied, too.
    alone = all(set(calls[each].sources) == {beside} for each in entries)
    return _Branch(beside, end, entries) if given and kept and alone else None


def _ancestors(calls: Sequence[Call]) -> list[set[int]]:
    found: list[set[int]] = []
    for call in calls:
        found.append(set(call.sources).union(*(found[source] for source in call.sources)))
    return found


def _cutting(calls: Sequence[Call], outputs: Sequence[int]) -> set[tuple[int, int]]:
    """The edges (source, target) without which the graph falls into two. All outputs end in one place, the loss."""
    edges = [(source, at) for at, call in enumerate(calls) for source in call.sources]
    edges += [(output, len(calls)) for output in outputs]
    beside: list[list[tuple[int, int]]] = [[] for _ in range(len(calls) + 1)]
    for number, (source, target) in enumerate(edges):
        beside[source].append((number, target))
        beside[target].append((number, source))
    depth, tree = {len(calls): 0}, dict[int, tuple[int, int]]()
    waiting = [len(calls)]
    for place in waiting:  # It grows while it is walked through.
        for number, other in beside[place]:
            if other not in depth:
                depth[other], tree[other] = depth[place] + 1, (number, place)
                waiting.append(other)
    # Each edge that is not in the tree closes a circle, whose edges do not cut.
    whole = set()
    within = {number for number, _ in tree.values()}
    for number, (one, other) in enumerate(edges):
        while number not in within and one != other:
            one, other = (one, other) if depth[one] >= depth[other] else (other, one)
            edge, one = tree[one]
            whole.add(edge)
    return {edges[number] for number in within - whole}
