"""What is claimed of two graphs of one policy."""

from __future__ import annotations

import numpy as np

from benchmarks.effects.effect import Claim, spread, with_range

FORMATS = ("float32", "float16", "bfloat16")
FIRST = "whole"
GRAPHS = ("XLA", "one at a time")
CONTEXT = 128
LENGTHS = 2 ** np.arange(int(np.log2(CONTEXT)) + 1)
SETTLED = 3
"""From 8 characters on a growth is read and drawn: a few characters may all have the same bits."""
BITS = 8.0
"""How many times as precise float16 is, by the bits of its fraction."""
KL = {"bfloat16": 7.64, "float16": 0.32}
"""The published divergence of sampler and trainer, of whole answers: figure 5 of the project's page."""
SLOPES = {"bfloat16": -1.01, "float16": -0.07}
"""The published slopes of log ratios there, per 1000 tokens."""
CLIP = 0.2
"""How far a ratio may be from 1. PPO clips that of a single action so; for a sequence the bound is ours."""
_CHANGED = 0.25
"""A graph that changes the bits of a smaller share of the characters is nearly the same: it cannot tell."""
_ALIKE = 1.1
"""A graph treats two formats alike where its distances from float32, over those of the first graph, are as near."""
RULE = (
    f"A graph cannot tell where it changes under {100 * _CHANGED:.0f} % of the characters in a 16-bit format, nor "
    "which format differs more where its distance from float32, against the first graph's, differs between the formats "
    f"by over {100 * (_ALIKE - 1):.0f} % (our bounds)."
)
"""What is said of both."""

Seen = dict[tuple[str, str], np.ndarray]
"""Values [seeds], or [seeds, lengths], by graph and format."""


def claims_of(token: Seen, away: Seen, deviation: Seen, beyond: Seen, same: Seen) -> tuple[Claim, ...]:
    """What is claimed.

    Args:
        token: The mean difference of a character from the first graph [seeds], in nats.
        away: The same from the first graph in float32 [seeds], also of the first graph.
        deviation: The root mean square of the log ratios of sequences [seeds, lengths], in nats.
        beyond: The share of sequences whose ratio is further than `CLIP` from 1 [seeds, lengths].
        same: The share of characters with the same bits as in the first graph [seeds].
    """
    factor = {graph: token[graph, "bfloat16"] / token[graph, "float16"] for graph in GRAPHS}
    changed = changed_factor(token, same)
    exact = {graph: _of_changed(token, same, graph, "float32", "float16") for graph in GRAPHS}
    wider = {graph: deviation[graph, "bfloat16"][:, -1] / deviation[graph, "float16"][:, -1] for graph in GRAPHS}
    bits = {graph: away[graph, "bfloat16"] / away[graph, "float16"] for graph in (FIRST, *GRAPHS)}
    return (
        Claim(
            f"in each seed each graph is {BITS:.0f} times as far from float32 in bfloat16 as in float16, to a factor "
            "of 2.",
            all(_near(each, BITS) for each in bits.values()),
            published=False,
        ),
        *(
            Claim(
                f"{graph}: in each seed characters that change differ {BITS:.0f} times as much in bfloat16, to a "
                f"factor of 2{_few(graph, same)}.",
                _near(changed[graph], BITS) if _told(graph, same) else None,
                published=False,
            )
            for graph in GRAPHS
        ),
        _divergence(deviation),
        *(
            _direction(graph, what, each[graph], same, away)
            for what, each in (("the average character", factor), (f"the log ratio of {CONTEXT} characters", wider))
            for graph in GRAPHS
        ),
        *(
            Claim(
                f"{graph}: in each seed they differ less than a hundredth as much in float32 as in "
                f"float16{_few(graph, same)}.",
                bool((exact[graph] < 0.01).all()) if _told(graph, same) else None,
                published=False,
            )
            for graph in GRAPHS
        ),
        _growth(deviation),
        Claim(
            f"XLA: no float16 ratio of {CONTEXT} characters leaves 1 ± {CLIP} (some published ones, of longer "
            "answers, do).",
            bool((beyond["XLA", "float16"][:, -1] == 0).all()),
            published=False,
        ),
        Claim(
            "XLA: in each seed some do in bfloat16.",
            bool((beyond["XLA", "bfloat16"][:, -1] > 0).all()),
            published=False,
        ),
    )


def _direction(graph: str, what: str, factors: np.ndarray, same: Seen, away: Seen) -> Claim:
    """That a graph differs more in bfloat16. One that is nearly the first, or treats formats differently, is silent."""
    nearer = {name: away[graph, name] / away[FIRST, name] for name in KL}
    about = "" if _told(graph, same) else "; too few characters change"
    if not about and not _near(nearer["bfloat16"] / nearer["float16"], 1, _ALIKE):
        about = "; it treats the formats differently"
    return Claim(
        f"{graph}: {what} differs more in bfloat16 in each seed ({(factors > 1).sum()} of {len(factors)}{about}).",
        None if about else bool((factors > 1).all()),
    )


def _divergence(deviation: Seen) -> Claim:
    """The published divergence, with which only differences of such a size can be compared."""
    last = {name: np.array([deviation[graph, name][:, -1] for graph in GRAPHS]) for name in KL}
    ratio = KL["bfloat16"] / KL["float16"]
    # KL divergence is half of the mean square of log ratios where these are small.
    comparable = _near(last["bfloat16"] ** 2 / 2, KL["bfloat16"], 4)
    about = "" if comparable else f" ({CONTEXT} given characters differ too little to compare)"
    return Claim(
        f"the KL divergence of whole answers is {ratio:.0f} times as large in bfloat16{about}.",
        _near((last["bfloat16"] / last["float16"]) ** 2, ratio, 4) if comparable else None,
    )


def _growth(deviation: Seen) -> Claim:
    """How a deviation grows with the length."""
    growth = {
        name: np.log2(deviation["XLA", name][:, -1] / deviation["XLA", name][:, SETTLED]) / (len(LENGTHS) - 1 - SETTLED)
        for name in ("float16", "bfloat16")
    }
    return Claim(
        "XLA: in each seed a log ratio spreads by a power of the length between 0.25 and 0.75 (from "
        f"{LENGTHS[SETTLED]} to {CONTEXT} characters: "
        + ", ".join(f"{name} {spread(each, '.2f')}" for name, each in growth.items())
        + ").",
        all(bool((each > 0.25).all() and (each < 0.75).all()) for each in growth.values()),
        published=False,
    )


def _near(factors: np.ndarray, to: float, room: float = 2) -> bool:
    return bool((factors >= to / room).all() and (factors <= room * to).all())


def times(factors: np.ndarray, form: str = ".1f") -> str:
    """The geometric mean of factors, with the least and the greatest."""
    return with_range(*(f"{each:{form}}" for each in (np.exp(np.log(factors).mean()), factors.min(), factors.max())))


def each_of(factors: dict[str, np.ndarray], form: str = ".1f") -> str:
    """The same of each graph, with its name."""
    return ", ".join(f"{said} {times(each, form)}" for said, each in factors.items())


def changed_factor(token: Seen, same: Seen) -> dict[str, np.ndarray]:
    """By graph: how many times as far a character that changes is in bfloat16 as in float16 [seeds]."""
    return {graph: _of_changed(token, same, graph, "bfloat16", "float16") for graph in GRAPHS}


def _of_changed(token: Seen, same: Seen, graph: str, name: str, other: str) -> np.ndarray:
    """The mean difference of those characters that change in a format, over that in another [seeds]."""
    one, two = (token[graph, each] / (1 - same[graph, each]) for each in (name, other))
    return one / two


def _told(graph: str, same: Seen) -> bool:
    """Whether a graph changes enough characters to differ from the first one."""
    return all((1 - same[graph, name]).mean() >= _CHANGED for name in KL)


def _few(graph: str, same: Seen) -> str:
    return "" if _told(graph, same) else " (too few characters change)"
