"""Whose tensors a step measures, for what reads its outputs: a `TrainStep`'s own, or those of each part of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Watched(NamedTuple):
    """A watch of a step, and the names of what it measures.

    Attributes:
        part: The name of the part; "" for that of a whole step.
        watch: The watch, known after the step's first trace.
        sparse: Its rows that are gradients of the type `tf.IndexedSlices`.
    """

    part: str
    watch: Any
    sparse: frozenset[str] = frozenset()

    def output(self, name: str) -> str:
        """An output of the step: "amax", or "critic/amax" of a part."""
        return f"{self.part}/{name}" if self.part else name

    def row(self, name: str) -> str:
        """A row among those of all parts: "activations/dense", or "activations/critic/dense" of a part."""
        kind, _, path = name.partition("/")
        return f"{kind}/{self.part}/{path}" if self.part else name


def watched_by(train_step: Any) -> list[Watched]:
    """The watches of a train step, in the order of its outputs; none without probes.

    Args:
        train_step: Any.
    """
    probes = getattr(train_step, "probes", None)
    if probes is None:
        return []
    sparse: Any = getattr(train_step, "sparse_gradients", frozenset())
    if isinstance(probes, Mapping):
        return [Watched(part, watch, sparse.get(part, frozenset())) for part, watch in probes.items()]
    return [Watched("", probes, frozenset(sparse))]
