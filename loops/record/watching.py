"""How to give a step probes, in words: what a reader of a trace says is missing."""

from __future__ import annotations

from collections.abc import Sequence


def probes_for(parts: Sequence[str]) -> str:
    """The argument that watches a step: of a `TrainStep`, or of a `ComposedStep` by the names of its parts.

    Args:
        parts: The names of its parts; empty for a `TrainStep`, or if the step is unknown.
    """
    if not parts:
        return "TrainStep(..., probes=hs.observe.watch(model))"
    each = ", ".join(f'"{part}": hs.observe.watch({part})' for part in parts)
    return f"ComposedStep(..., probes={{{each}}})"
