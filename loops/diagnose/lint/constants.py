"""Constants that float16 cannot hold, as findings."""

from __future__ import annotations

from loops.diagnose.graph.calls import Traced
from loops.diagnose.graph.literals import lost_literals
from loops.diagnose.lint.finding import Finding, Kind, note


def lost_constants(traced: Traced, twin: Traced) -> list[Finding]:
    """A finding for each constant of a float16 graph that means something else than in float32."""
    findings: dict[tuple, Finding] = {}
    for one in lost_literals(traced.graph, twin.graph):
        layer = traced.place_of_node(one.node)
        make = note if one.chosen else Finding
        key = (layer, one.before, one.after, one.chosen)
        findings.setdefault(key, make(layer, f"{one.said}.", one.measured, one.instead, Kind.CONSTANT))
    return list(findings.values())
