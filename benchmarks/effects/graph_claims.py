"""What is claimed of two graphs of one policy."""

from __future__ import annotations

import numpy as np

from benchmarks.effects.effect import Claim, percent, spread

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
    f"Differences from the first graph cannot tell where fewer than {100 * _CHANGED:.0f} % of the characters change in "
    "one of the 16-bit formats; nor which format differs more where a graph's distance from float32, over that of the "
    f"first graph, is not the same in both, to {100 * (_ALIKE - 1):.0f} % (our bounds)."
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
            f"of 2 ({each_of(bits)}).",
            all(_near(each, BITS) for each in bits.values()),
            published=False,
        ),
        *(
            Claim(
                f"{graph}: in each seed a character that changes is {BITS:.0f} times as far from the first graph in "
                f"bfloat16 as in float16, to a factor of 2 ({times(changed[graph])}; of all characters "
                f"{times(factor[graph])}, as bfloat16 changes {_changed(same[graph, 'bfloat16'])} of them and float16 "
                f"{_changed(same[graph, 'float16'])}{_few(graph, same)}).",
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
                f"{graph}: in each seed a character that changes is less than a hundredth as far from the first graph "
                f"in float32 as in float16 ({times(exact[graph], '.4f')} of it{_few(graph, same)}).",
                bool((exact[graph] < 0.01).all()) if _told(graph, same) else None,
                published=False,
            )
            for graph in GRAPHS
        ),
        _growth(deviation),
        Claim(
            f"XLA: in float16 no ratio of {CONTEXT} characters leaves 1 ± {CLIP} (some published ones do, of longer "
            "answers).",
            bool((beyond["XLA", "float16"][:, -1] == 0).all()),
            published=False,
        ),
        Claim(
            f"XLA: in each seed some do in bfloat16 ({percent(beyond['XLA', 'bfloat16'][:, -1], '.1f')}).",
            bool((beyond["XLA", "bfloat16"][:, -1] > 0).all()),
            published=False,
        ),
    )


def _direction(graph: str, what: str, factors: np.ndarray, same: Seen, away: Seen) -> Claim:
    """That a graph differs more in bfloat16. One that is nearly the first, or treats formats differently, is silent."""
    changed = {name: _changed(same[graph, name]) for name in KL}
    nearer = {name: away[graph, name] / away[FIRST, name] for name in KL}
    told = False
    if not _told(graph, same):
        about = f"only {changed['bfloat16']} of the characters change in bfloat16 and {changed['float16']} in float16"
    elif not _near(nearer["bfloat16"] / nearer["float16"], 1, _ALIKE):
        about = (
            f"from float32 this graph is {spread(nearer['bfloat16'], '.2f')} times as far as the first one in bfloat16 "
            f"and {spread(nearer['float16'], '.2f')} times in float16, so it treats the formats differently"
        )
    else:
        told, about = True, "two real engines are not tested"
    return Claim(
        f"{graph}: in each seed {what} differs more in bfloat16 than in float16 (by a factor of {times(factors)}, more "
        f"in {(factors > 1).sum()} of {len(factors)} seeds; {about}).",
        bool((factors > 1).all()) if told else None,
    )


def _divergence(deviation: Seen) -> Claim:
    """The published divergence, with which only differences of such a size can be compared."""
    last = {name: {graph: deviation[graph, name][:, -1] for graph in GRAPHS} for name in KL}
    ratio = KL["bfloat16"] / KL["float16"]
    # KL divergence is half of the mean square of log ratios where these are small.
    comparable = all(_near(each**2 / 2, KL["bfloat16"], 4) for each in last["bfloat16"].values())
    ratios = [last["bfloat16"][graph] / last["float16"][graph] for graph in GRAPHS]
    squares = [each**2 for each in ratios]
    return Claim(
        f"the KL divergence of whole answers is {ratio:.0f} times as large in bfloat16; published are {KL['bfloat16']} "
        f"and {KL['float16']}, of long answers that were sampled, and here log ratios of {CONTEXT} given characters "
        + ", ".join(
            f"{said} {' and '.join(f'{each.mean():.2g}' for each in last[name].values())} nats in {name}"
            for said, name in zip(("deviate by", "by"), KL, strict=True)
        )
        + f" (what compares with {ratio:.0f} are their squares, {' and '.join(times(each, '.0f') for each in squares)} "
        f"times, not these themselves, {' and '.join(times(each) for each in ratios)} times).",
        all(_near(each, ratio, 4) for each in squares) if comparable else None,
    )


def _growth(deviation: Seen) -> Claim:
    """How a deviation grows with the length."""
    growth = {
        name: np.log2(deviation["XLA", name][:, -1] / deviation["XLA", name][:, SETTLED]) / (len(LENGTHS) - 1 - SETTLED)
        for name in ("float16", "bfloat16")
    }
    return Claim(
        "XLA: in each seed the log ratio of a sequence spreads by a power of its length between 0.25 and 0.75, "
        "nearer to its root than to the length itself (by its two end points, "
        f"{LENGTHS[SETTLED]} and {CONTEXT} characters: "
        + ", ".join(f"{name} by a power of {spread(each, '.2f')}" for name, each in growth.items())
        + "; one at a time too few characters differ for that).",
        all(bool((each > 0.25).all() and (each < 0.75).all()) for each in growth.values()),
        published=False,
    )


def _near(factors: np.ndarray, to: float, room: float = 2) -> bool:
    return bool((factors >= to / room).all() and (factors <= room * to).all())


def times(factors: np.ndarray, form: str = ".1f") -> str:
    """The geometric mean of factors, with the least and the greatest."""
    mean, low, high = (f"{each:{form}}" for each in (np.exp(np.log(factors).mean()), factors.min(), factors.max()))
    return mean if low == high else f"{mean} ({low} to {high})"


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
    return "" if _told(graph, same) else "; too few characters change"


def _changed(same: np.ndarray) -> str:
    return f"{100 * (1 - same.mean()):.0f} %"
