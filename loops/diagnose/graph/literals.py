"""Literals that float16 cannot hold: epsilons that become 0, masks that become infinite, limits that become 1.

A graph is traced twice, as it is and in float32, and constants with the same name are compared.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from loops.diagnose.graph.operations import CHOICES

_HALF = tf.float16.as_datatype_enum
_NUMBER = re.compile(r"_\d+$")


@dataclasses.dataclass(frozen=True)
class Literal:
    """A constant of a float16 graph whose rounded value has another meaning than its value in float32.

    Attributes:
        node: The name of its node in the graph.
        before: Its value in float32.
        after: Its value in float16.
        chosen: Whether it is a mask that only `where` reads. It is never added to anything, so it harms only a softmax
            of nothing but masked values.
    """

    node: str
    before: float
    after: float
    chosen: bool

    @property
    def problem(self) -> str:
        """The problem in one sentence, without a capital letter and a full stop."""
        number = f"{float(str(np.float32(self.before))):.9g}"
        if self.chosen:
            return (
                f"the mask {number} is {self.after:g} in float16: a softmax of nothing but masked values is NaN there, "
                "but not in float32"
            )
        return f"the constant {number} is {self.after:g} in float16: {self._what()}"

    def _what(self) -> str:
        if self.after == 0:
            return "it no longer prevents a division by 0"
        if abs(self.after) == 1:
            return "values that it should keep below 1 reach 1"
        if self.before < 0:
            return "a fully masked row, or a mask multiplied by 0, gives NaN"
        return "it no longer limits anything, and multiplied by 0 it gives NaN"

    @property
    def measured(self) -> str:
        """The measurement behind it, with numbers."""
        if self.chosen:
            return f"In float16 {self.node} is {self.after:g}, and only `where` reads it."
        if self.after == 0:
            return f"In float16 {self.node} is 0; the smallest magnitude there is 6e-8."
        if abs(self.after) == 1:
            return f"In float16 {self.node} is {self.after:g}; the next magnitude below 1 is 1 - 2^-11 = 0.99951."
        return f"In float16 {self.node} is {self.after:g}; the largest magnitude there is 65504."

    @property
    def instead(self) -> str:
        """What to write instead, in one sentence."""
        if self.chosen:
            return "Write -3e4 instead, if a row can be fully masked."
        if self.after == 0:
            return "Write an epsilon of 1e-4 or more, or compute this layer with dtype='float32'."
        if abs(self.after) == 1:
            return "Write 1 - 1e-3, or compute this layer with dtype='float32'."
        if self.before < 0:
            return "Write -3e4 instead, so that two masks can be added, or compute this layer with dtype='float32'."
        return "Write a limit of 3e4 or less, or compute this layer with dtype='float32'."


def lost_literals(graph: tf.Graph, twin: tf.Graph) -> Iterator[Literal]:
    """The literals of a graph that float16 cannot hold.

    Args:
        graph: A graph that computes in float16, at least in part.
        twin: The same graph in float32.
    """
    intended = {place: value for place, value, _, _ in _constants(twin)}
    for place, own, cast, consumers in _constants(graph):
        reference = intended.get(place)
        if reference is None or not (cast or own.dtype == np.float16) or reference.shape != own.shape:
            continue
        with np.errstate(over="ignore"):
            lost = _lost(reference.astype(np.float64), own.astype(np.float16).astype(np.float64))
        # In float16, `minimum(x, inf)` equals `minimum(x, 1e9)`: these infinities limit nothing that is there.
        if lost and (lost[1], consumers) not in ((np.inf, {"Minimum"}), (-np.inf, {"Maximum"})):
            yield Literal(place[1], *lost, lost[1] == -np.inf and consumers <= CHOICES)


def _lost(reference: np.ndarray, value: np.ndarray) -> tuple[float, float] | None:
    """The first value, before and after rounding, that became infinite, or a scalar that became 0, 1 or -1."""
    infinite = np.isfinite(reference) & ~np.isfinite(value)
    if infinite.any():
        return float(reference[infinite][0]), float(value[infinite][0])
    if reference.size == 1:
        before, after = float(reference.reshape(())), float(value.reshape(()))
        if before != after and abs(after) in (0.0, 1.0):
            return before, after
    return None


def _constants(graph: tf.Graph) -> Iterator[tuple[tuple[str, str], np.ndarray, bool, set[str]]]:
    """The floating-point constants of a graph and of its functions.

    Each with its function's name and its own, its value in the graph's dtype, whether it is cast to float16, and the
    types of the operations that read it, or its cast to float16.
    """
    definition = graph.as_graph_def()
    bodies = [("", definition.node)]
    bodies += [(_NUMBER.sub("", one.signature.name), one.node_def) for one in definition.library.function]
    for function, nodes in bodies:
        users: dict[str, list] = collections.defaultdict(list)
        for node in nodes:
            for name in node.input:
                users[name.split(":")[0]].append(node)
        for node in nodes:
            if node.op == "Const" and tf.as_dtype(node.attr["dtype"].type).is_floating:
                casts = [one for one in users[node.name] if one.op == "Cast" and one.attr["DstT"].type == _HALF]
                kinds = {one.op for user in users[node.name] for one in (users[user.name] if user in casts else [user])}
                yield (function, node.name), tf.make_ndarray(node.attr["value"].tensor), bool(casts), kinds
