"""How far two graphs of one policy differ in bfloat16 and in float16, and what that makes of importance ratios."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import keras
import numpy as np

import scaler
from loops import tasks
from loops.loop.loop import Loop
from loops.step.train_step import TrainStep
from loops.study.effects.decoding import LogProbabilities, one_by_one, whole
from loops.study.effects.effect import Claim, Effect, Line, Panel, Preset, curve, percent, spread
from loops.tasks import TextTask

NAME = "second-graph"
_FORMATS = ("float32", "float16", "bfloat16")
_FIRST = "whole"
_GRAPHS = ("XLA", "one at a time")
_CONTEXT, _WIDTH = 128, 32
_RATE, _BATCH = 3e-3, 32
_SEQUENCES = 64
_LENGTHS = 2 ** np.arange(int(np.log2(_CONTEXT)) + 1)
_SETTLED = 3
"""From 8 characters on a growth is read and drawn: a few characters may all have the same bits."""
_BITS = 8.0
"""How many times as precise float16 is, by the bits of its fraction."""
_PUBLISHED = 24.0
"""The reduction of KL divergence that a news article names, in which a difference counts by its square."""
_CLIP = 0.2
"""How far a ratio may be from 1, as PPO clips it."""


def run(seeds: int = 5, steps: int = 100) -> Effect:
    """Trains a small transformer in float32, and takes the log-probabilities of held-out text from three graphs.

    Args:
        seeds: The number of networks.
        steps: The steps of training.
    """
    seen = _measure(seeds, steps)
    all_graphs = (_FIRST, *_GRAPHS)
    settled = _LENGTHS[_SETTLED:]
    cases = list(itertools.product(_GRAPHS, _FORMATS))
    differences = {(graph, name): seen[graph, name] - seen[_FIRST, name] for graph, name in cases}
    token = {case: np.abs(each).mean(axis=(1, 2)) for case, each in differences.items()}
    same = {case: (each == 0).mean(axis=(1, 2)) for case, each in differences.items()}
    ratios = {case: np.cumsum(each, axis=2)[:, :, _LENGTHS - 1] for case, each in differences.items()}
    deviation = {case: np.sqrt((each**2).mean(axis=1)) for case, each in ratios.items()}
    beyond = {case: (np.abs(np.expm1(each)) > _CLIP).mean(axis=1) for case, each in ratios.items()}
    widest = {case: np.exp(np.abs(each[:, :, -1])).max(axis=1) for case, each in ratios.items()}
    away = {case: np.abs(each - seen[_FIRST, "float32"]).mean(axis=(1, 2)) for case, each in seen.items()}
    factor = {graph: token[graph, "bfloat16"] / token[graph, "float16"] for graph in _GRAPHS}
    wider = {graph: deviation[graph, "bfloat16"][:, -1] / deviation[graph, "float16"][:, -1] for graph in _GRAPHS}
    nearer = {name: away["XLA", name] / away[_FIRST, name] for name in ("bfloat16", "float16")}
    return Effect(
        name=NAME,
        title="A second graph of the same policy",
        question="Reinforcement learning samples from one compiled graph of a policy and trains another. Their "
        "weights are the same; their roundings are not. How far apart are the log-probabilities in bfloat16 and in "
        "float16, and what does that make of the ratio of a whole sequence's probabilities?",
        published="[Qi et al. 2025](https://arxiv.org/abs/2510.26788): the mismatch of training and inference comes "
        "from the large rounding errors of bfloat16, and float16 effectively eliminates it. [Figure "
        "5](https://github.com/sail-sg/Precision-RL) shows the distribution of the log ratio of sequences. The texts "
        "that this page could read have no number for it. A [news "
        "article](https://airesearch.news/article/ai-training-fix-solves-a-hidden-flaw) names one for another measure: "
        f"KL divergence falls to about 1/{_PUBLISHED:.0f}. KL grows as the square of small differences. So float16's 3 "
        f"more bits, which round {_BITS:.0f} times finer, would make it {_BITS**2:.0f} times smaller.",
        design=f"A transformer on text (two blocks of width {_WIDTH}, sequences of {_CONTEXT} characters) trains in "
        f"float32 with Adam at {_RATE}. The same weights then run under `mixed_bfloat16`, `mixed_float16` and float32, "
        f"on {_SEQUENCES} held-out sequences: whole with a causal mask, the same compiled by XLA, and one character at "
        "a time with what came before kept. The log-probabilities of the text's own characters are compared with those "
        "of the first graph, all in float32 from the logits on. The ratio of a sequence is exp of the summed "
        "differences of its first characters. Nothing is trained by reinforcement, and the text is not sampled from "
        "the policy: these ratios are computed as importance ratios are, but are none. Factors are geometric means.",
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "distance of a character from float32: bfloat16's, times float16's",
                f"no number; {_BITS:.0f} by the bits",
                _each({graph: away[graph, "bfloat16"] / away[graph, "float16"] for graph in all_graphs}),
            ),
            (
                "difference of a character from the first graph, likewise",
                f"no number; {_BITS:.0f} by the bits",
                _each(factor),
            ),
            (
                f"deviation of the log ratio of {_CONTEXT} characters, likewise",
                f"no number; {_BITS:.0f} by the bits",
                _each(wider),
            ),
            (
                "its square, as KL divergence",
                f"about {_PUBLISHED:.0f} in a news article; {_BITS**2:.0f} by the bits",
                _each({graph: each**2 for graph, each in wider.items()}, ".0f"),
            ),
        ),
        columns=(
            "second graph",
            "format",
            "same bits",
            "difference of a character",
            "of it from float32",
            f"deviation of the log ratio of {_CONTEXT}",
            "largest ratio, or its inverse",
            f"beyond 1 ± {_CLIP}",
        ),
        rows=tuple(
            (
                *case,
                percent(same[case], ".1f"),
                spread(token[case], ".2g"),
                spread(away[case], ".2g"),
                spread(deviation[case][:, -1], ".2g"),
                spread(widest[case], ".3f"),
                percent(beyond[case][:, -1], ".1f"),
            )
            for case in cases
        ),
        claims=_claims(token, away, deviation, beyond, same),
        remarks="Both formats sum in float32, and a graph differs from another where it rounds at other places, or "
        "after another order of a sum. From float32, which rounds 2^13 times finer than float16, the whole sequence is "
        f"{_times(away[_FIRST, 'bfloat16'] / away[_FIRST, 'float16'])} times as far in bfloat16 as in float16. "
        "From each other two graphs are as far as their roundings differ, and that need not be alike in both formats. "
        "XLA merges operations and may leave out roundings between them. Of the characters "
        f"{percent(same['XLA', 'bfloat16'])} keep their bits in bfloat16 and {percent(same['XLA', 'float16'])} in "
        f"float16, and from float32 XLA is {spread(nearer['bfloat16'], '.2f')} and "
        f"{spread(nearer['float16'], '.2f')} times as far as the graph without it. One character at a time has the "
        "same operations on other shapes, which this CPU mostly sums alike: "
        f"{percent(same['one at a time', 'bfloat16'])} and {percent(same['one at a time', 'float16'])} keep their "
        "bits. An engine with kernels of its own is not so near. Differences of single characters are small. The ratio "
        "of a sequence multiplies them, so that its spread grows with the length, and answers of a language model are "
        "far longer than these. A policy in float16 usually needs a loss scale to be trained, which is what this "
        "library is for; [unit scaling](unit-scaling.md) has a small model that does without.",
        panels=(
            Panel(
                "bfloat16's difference, times float16's",
                "",
                "factor",
                (
                    _factors(
                        "from float32",
                        range(len(all_graphs)),
                        [away[g, "bfloat16"] / away[g, "float16"] for g in all_graphs],
                    ),
                    _factors("character", [1, 2], [factor[graph] for graph in _GRAPHS]),
                    _factors("sequence", [1, 2], [wider[graph] for graph in _GRAPHS]),
                ),
                log_y=10,
                reference=(_BITS, f"bits: {_BITS:.0f}"),
                ticks=all_graphs,
            ),
            Panel(
                "log ratio of a sequence, XLA",
                "characters",
                "root mean square, nats",
                tuple(curve(name, settled, deviation["XLA", name][:, _SETTLED:].T) for name in _FORMATS[1:]),
                log_x=2,
                log_y=10,
            ),
            Panel(
                f"ratios beyond 1 ± {_CLIP}, XLA",
                "characters",
                "share of sequences",
                tuple(curve(name, settled, beyond["XLA", name][:, _SETTLED:].T) for name in _FORMATS[1:]),
                log_x=2,
            ),
        ),
        measured={
            f"{kind} {' '.join(case)}": values[case].tolist()
            for case in cases
            for kind, values in (
                ("difference", token),
                ("from float32", away),
                ("largest ratio", widest),
                ("same", same),
            )
        }
        | {f"deviation {' '.join(case)}": deviation[case][:, -1].tolist() for case in cases}
        | {f"factor {graph}": factor[graph].tolist() for graph in _GRAPHS}
        | {f"factor of the deviation {graph}": wider[graph].tolist() for graph in _GRAPHS},
    )


def _claims(
    token: dict[tuple[str, str], np.ndarray],
    away: dict[tuple[str, str], np.ndarray],
    deviation: dict[tuple[str, str], np.ndarray],
    beyond: dict[tuple[str, str], np.ndarray],
    same: dict[tuple[str, str], np.ndarray],
) -> tuple[Claim, ...]:
    """What is claimed: `deviation` and `beyond` are [seeds, lengths], the others [seeds]."""
    factor = {graph: token[graph, "bfloat16"] / token[graph, "float16"] for graph in _GRAPHS}
    wider = {graph: deviation[graph, "bfloat16"][:, -1] / deviation[graph, "float16"][:, -1] for graph in _GRAPHS}
    bits = {graph: away[graph, "bfloat16"] / away[graph, "float16"] for graph in (_FIRST, *_GRAPHS)}
    growth = {
        name: np.log2(deviation["XLA", name][:, -1] / deviation["XLA", name][:, _SETTLED])
        / (len(_LENGTHS) - 1 - _SETTLED)
        for name in ("float16", "bfloat16")
    }
    return (
        Claim(
            f"in each seed each graph is {_BITS:.0f} times as far from float32 in bfloat16 as in float16, to a factor "
            f"of 2 ({_each(bits)}).",
            all(_near(each, _BITS) for each in bits.values()),
        ),
        *(
            Claim(
                f"{graph}: in each seed a character is {_BITS:.0f} times as far from the first graph in bfloat16 as in "
                f"float16, to a factor of 2 ({_times(factor[graph])}; that is not the size of roundings alone: "
                f"bfloat16 changes {_changed(same[graph, 'bfloat16'])} of the characters, float16 "
                f"{_changed(same[graph, 'float16'])}).",
                _near(factor[graph], _BITS),
            )
            for graph in _GRAPHS
        ),
        Claim(
            f"XLA: in each seed the square of the deviation of a sequence's log ratio, as KL divergence, is "
            f"{_PUBLISHED:.0f} times as large in bfloat16 (a news article), to a factor of 4 "
            f"({_times(wider['XLA'] ** 2, '.0f')}).",
            _near(wider["XLA"] ** 2, _PUBLISHED, 4),
        ),
        Claim(
            "XLA: in each seed bfloat16 differs more than float16 (published: the mismatch is that of bfloat16's "
            "rounding errors).",
            bool((factor["XLA"] > 1).all()),
        ),
        Claim(
            "XLA: in each seed float32 differs by less than a hundredth of what float16 does, a yardstick of ours ("
            f"{_times(token['XLA', 'float32'] / token['XLA', 'float16'], '.4f')} of it).",
            bool((token["XLA", "float32"] < token["XLA", "float16"] / 100).all()),
        ),
        Claim(
            "XLA: in each seed the log ratio of a sequence spreads by a power of its length between 0.25 and 0.75, "
            "nearer to its root than to the length itself ("
            + ", ".join(f"{name} by a power of {spread(each, '.2f')}" for name, each in growth.items())
            + "; a yardstick of ours).",
            all(bool((each > 0.25).all() and (each < 0.75).all()) for each in growth.values()),
        ),
        Claim(
            f"in float16 no ratio of {_CONTEXT} characters leaves 1 ± {_CLIP} (published: the mismatch is effectively "
            "eliminated; the bounds are ours, as PPO clips).",
            all(bool((beyond[graph, "float16"][:, -1] == 0).all()) for graph in _GRAPHS),
        ),
        Claim(
            f"XLA: in each seed some do in bfloat16 ({percent(beyond['XLA', 'bfloat16'][:, -1], '.1f')}).",
            bool((beyond["XLA", "bfloat16"][:, -1] > 0).all()),
        ),
    )


def _near(factors: np.ndarray, to: float, room: float = 2) -> bool:
    return bool((factors >= to / room).all() and (factors <= room * to).all())


def _times(factors: np.ndarray, form: str = ".1f") -> str:
    """The geometric mean of factors, with the least and the greatest."""
    mean, low, high = (f"{each:{form}}" for each in (np.exp(np.log(factors).mean()), factors.min(), factors.max()))
    return mean if low == high else f"{mean} ({low} to {high})"


def _each(factors: dict[str, np.ndarray], form: str = ".1f") -> str:
    return ", ".join(f"{said} {_times(each, form)}" for said, each in factors.items())


def _factors(label: str, x: Sequence[int], factors: Sequence[np.ndarray]) -> Line:
    """As `curve`, with geometric means."""
    line = curve(label, x, np.array(factors))
    return dataclasses.replace(line, y=tuple(float(f"{np.exp(np.log(each).mean()):.6g}") for each in factors))


def _changed(same: np.ndarray) -> str:
    return f"{100 * (1 - same.mean()):.0f} %"


def _measure(seeds: int, steps: int) -> dict[tuple[str, str], np.ndarray]:
    """By graph and format: the log-probabilities, float64 [seeds, sequences, positions]."""
    task = dataclasses.replace(_text(), context=_CONTEXT, width=_WIDTH)
    starts = np.linspace(0, len(task.test_characters) - _CONTEXT - 1, _SEQUENCES).astype(int)[:, None]
    given, following = (task.test_characters[starts + np.arange(_CONTEXT) + later].astype(np.int32) for later in (0, 1))
    models = {name: task.model("float32" if name == "float32" else f"mixed_{name}") for name in _FORMATS}
    graphs: dict[tuple[str, str], LogProbabilities] = {}
    for name, model in models.items():
        made = whole(model, xla=False), whole(model, xla=True), one_by_one(model)
        graphs |= {(graph, name): each for graph, each in zip((_FIRST, *_GRAPHS), made, strict=True)}
    found: dict[tuple[str, str], list[np.ndarray]] = {case: [] for case in graphs}
    for seed in range(seeds):
        weights = _trained(task, seed, steps)
        for model in models.values():
            model.set_weights(weights)
        for case, log_probabilities in graphs.items():
            found[case].append(log_probabilities(given, following).astype(np.float64))
    return {case: np.stack(each) for case, each in found.items()}


def _text() -> TextTask:
    task = tasks.load("text")
    assert isinstance(task, TextTask)
    return task


def _trained(task: TextTask, seed: int, steps: int) -> list[np.ndarray]:
    """The weights of a network that was trained in float32."""
    keras.utils.set_random_seed(seed)
    model = task.model("float32")
    loss_scaler = scaler.LossScaler(scaler.NoScaling())
    step = TrainStep(model, task.loss, keras.optimizers.Adam(_RATE), loss_scaler=loss_scaler)
    Loop(step, task.dataset(_BATCH, seed), steps_per_call=10).run(steps)
    return model.get_weights()


PRESET = Preset(NAME, "two graphs of one policy, in bfloat16 and in float16", 100, run, seeds=5)
