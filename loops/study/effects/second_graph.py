"""How far two graphs of one policy differ in bfloat16 and in float16, and what that makes of importance ratios."""

from __future__ import annotations

import dataclasses
import itertools

import keras
import numpy as np

import scaler
from loops import tasks
from loops.loop.loop import Loop
from loops.step.train_step import TrainStep
from loops.study.effects.decoding import LogProbabilities, one_by_one, whole
from loops.study.effects.effect import Claim, Effect, Panel, Preset, curve, percent, spread
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
"""From 8 characters on a growth is read: a few characters may all have the same bits."""
_PUBLISHED = 8.0
"""How many times as precise float16 is."""
_CLIP = 0.2
"""How far a ratio may be from 1, as PPO clips it."""


def run(seeds: int = 5, steps: int = 100) -> Effect:
    """Trains a small transformer in float32, and takes the log-probabilities of held-out text from three graphs.

    Args:
        seeds: The number of networks.
        steps: The steps of training.
    """
    seen = _measure(seeds, steps)
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
    nearer = {name: away["XLA", name] / away[_FIRST, name] for name in ("bfloat16", "float16")}
    return Effect(
        name=NAME,
        title="A second graph of the same policy",
        question="Reinforcement learning samples from one compiled graph of a policy and trains another. Their "
        "weights are the same; their roundings are not. How far apart are the log-probabilities in bfloat16 and in "
        "float16, and what does that make of the importance ratio?",
        published="[Qi et al. 2025](https://arxiv.org/abs/2510.26788): the mismatch of training and inference comes "
        "from the large rounding errors of bfloat16, and float16 effectively eliminates it. It has 3 bits more: a "
        f"rounding error {_PUBLISHED:.0f} times smaller. A [summary of the "
        "paper](https://www.emergentmind.com/papers/2510.26788) names a reduction of up to 24 times.",
        design=f"A transformer on text (two blocks of width {_WIDTH}, {_CONTEXT} characters) trains in float32 with "
        f"Adam at {_RATE}. The same weights then run under `mixed_bfloat16`, `mixed_float16` and float32, on "
        f"{_SEQUENCES} held-out sequences: whole with a causal mask, the same compiled by XLA, and one character at a "
        "time with what came before kept. The log-probabilities of the text's own characters are compared with those "
        "of the first graph, all in float32 from the logits on. The ratio of a sequence is exp of the summed "
        "differences of its first characters. Nothing is trained by reinforcement.",
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "bfloat16's difference, times that of float16",
                f"{_PUBLISHED:.0f} by the bits of the formats, up to 24 in a summary",
                ", ".join(
                    f"{said} {spread(each, '.1f')}"
                    for said, each in (
                        ("from float32", away[_FIRST, "bfloat16"] / away[_FIRST, "float16"]),
                        *factor.items(),
                    )
                ),
            ),
        ),
        columns=(
            "second graph",
            "format",
            "same bits",
            "difference of a character",
            "of it from float32",
            f"deviation of the log ratio of {_CONTEXT}",
            "largest ratio",
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
        claims=_claims(token, away, deviation, beyond),
        remarks="Both formats sum in float32, and a graph differs from another where it rounds at other places, or "
        "after another order of a sum. From float32, whose rounding is 2^13 times finer than float16's, the "
        "whole sequence is "
        f"{spread(away[_FIRST, 'bfloat16'] / away[_FIRST, 'float16'], '.1f')} times as far in bfloat16 as in float16. "
        "From each other two graphs are as far as their roundings differ, and that need not be alike in both formats. "
        "XLA merges operations and may leave out roundings between them. Of the characters "
        f"{percent(same['XLA', 'bfloat16'])} keep their bits in bfloat16 and {percent(same['XLA', 'float16'])} in "
        f"float16, and from float32 XLA is {spread(nearer['bfloat16'], '.2f')} and "
        f"{spread(nearer['float16'], '.2f')} times as far as the graph without it. One character at a time has the "
        "same operations on other shapes, which this CPU mostly sums alike: "
        f"{percent(same['one at a time', 'bfloat16'])} and {percent(same['one at a time', 'float16'])} keep their "
        "bits. An engine with kernels of its own is not so near. Differences of single characters are small. The ratio "
        "of a sequence multiplies them, so that its spread grows with the length, and answers of a language model are "
        "far longer than these. A float16 policy needs a loss scale to be trained, which is what this library is for.",
        panels=(
            Panel(
                "difference of a character",
                "",
                "mean, nats",
                tuple(
                    curve(graph, range(len(_FORMATS)), np.array([token[graph, name] for name in _FORMATS]))
                    for graph in _GRAPHS
                )
                + (
                    curve(
                        "from float32",
                        range(len(_FORMATS)),
                        np.array(
                            [
                                away[_FIRST, name] if name != "float32" else away[_FIRST, name] * np.nan
                                for name in _FORMATS
                            ]
                        ),
                    ),
                    curve(
                        f"published, x {_PUBLISHED:.0f}",
                        [_FORMATS.index("bfloat16")],
                        _PUBLISHED * away[_FIRST, "float16"][None],
                    ),
                ),
                log_y=10,
                ticks=_FORMATS,
            ),
            Panel(
                "log ratio of a sequence, XLA",
                "characters",
                "root mean square, nats",
                tuple(curve(name, _LENGTHS, deviation["XLA", name].T) for name in _FORMATS[1:]),
                log_x=2,
                log_y=10,
            ),
            Panel(
                f"ratios beyond 1 ± {_CLIP}, XLA",
                "characters",
                "share of sequences",
                tuple(curve(name, _LENGTHS, beyond["XLA", name].T) for name in _FORMATS[1:]),
                log_x=2,
            ),
        ),
        measured={
            f"{kind} {' '.join(case)}": values[case].tolist()
            for case in cases
            for kind, values in (("difference", token), ("from float32", away), ("largest ratio", widest))
        }
        | {f"deviation {' '.join(case)}": deviation[case][:, -1].tolist() for case in cases}
        | {f"factor {graph}": factor[graph].tolist() for graph in _GRAPHS},
    )


def _claims(
    token: dict[tuple[str, str], np.ndarray],
    away: dict[tuple[str, str], np.ndarray],
    deviation: dict[tuple[str, str], np.ndarray],
    beyond: dict[tuple[str, str], np.ndarray],
) -> tuple[Claim, ...]:
    """What is claimed: `token` and `away` are [seeds], the others [seeds, lengths]."""
    factor = {graph: token[graph, "bfloat16"] / token[graph, "float16"] for graph in _GRAPHS}
    bits = {graph: away[graph, "bfloat16"] / away[graph, "float16"] for graph in (_FIRST, *_GRAPHS)}
    growth = {
        name: np.log2(deviation["XLA", name][:, -1] / deviation["XLA", name][:, _SETTLED])
        / (len(_LENGTHS) - 1 - _SETTLED)
        for name in ("float16", "bfloat16")
    }
    return (
        Claim(
            f"from float32 each graph is {_PUBLISHED:.0f} times as far in bfloat16 as in float16, to a factor of 2 ("
            + ", ".join(f"{graph} {spread(each, '.1f')}" for graph, each in bits.items())
            + ").",
            all(_as_published(each) for each in bits.values()),
        ),
        *(
            Claim(
                f"{graph}: so it is from the whole sequence without XLA, to a factor of 2 "
                f"({spread(factor[graph], '.1f')}).",
                _as_published(factor[graph]),
            )
            for graph in _GRAPHS
        ),
        Claim(
            "XLA: bfloat16 differs more than float16 (published: float16 eliminates the mismatch).",
            bool((factor["XLA"] > 1).all()),
        ),
        Claim(
            "XLA: in float32 it differs by less than a hundredth of what it does in float16.",
            bool((token["XLA", "float32"] < token["XLA", "float16"] / 100).all()),
        ),
        Claim(
            "XLA: the log ratio of a sequence spreads with its length, nearer to its root than to the length itself ("
            + ", ".join(f"{name} by a power of {spread(each, '.2f')}" for name, each in growth.items())
            + ").",
            all(bool((each > 0.25).all() and (each < 0.75).all()) for each in growth.values()),
        ),
        Claim(
            f"float16 eliminates the mismatch here: no ratio of {_CONTEXT} characters leaves 1 ± {_CLIP}.",
            all(bool((beyond[graph, "float16"][:, -1] == 0).all()) for graph in _GRAPHS),
        ),
        Claim(
            f"XLA: in bfloat16 some do ({percent(beyond['XLA', 'bfloat16'][:, -1], '.1f')}).",
            bool((beyond["XLA", "bfloat16"][:, -1] > 0).all()),
        ),
    )


def _as_published(factors: np.ndarray) -> bool:
    return bool((factors >= _PUBLISHED / 2).all() and (factors <= 2 * _PUBLISHED).all())


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
