"""How far two graphs of one policy differ in bfloat16 and in float16, and what that makes of importance ratios."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.effects.effect import Found, Line, curve, curves, flat, with_range
from benchmarks.effects.runs import text, trained

FORMATS = ("float32", "float16", "bfloat16")
FIRST = "whole"
GRAPHS = ("XLA", "one at a time")
_SHORT = {"XLA": "XLA", "one at a time": "one"}
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
_WIDTH = 32
_RATE, _BATCH = 3e-3, 32
_SEQUENCES = 64

Seen = Mapping[tuple[str, str], np.ndarray]
"""Values [seeds], or [seeds, lengths], by graph and format."""


def run(seeds: int, steps: int) -> Found:
    """Trains a small transformer in float32, and takes the log-probabilities of held-out text from three graphs.

    Args:
        seeds: The number of networks.
        steps: The steps of training.
    """
    seen = _measure(seeds, steps)
    cases = list(itertools.product(GRAPHS, FORMATS))
    differences = {(graph, name): seen[graph, name] - seen[FIRST, name] for graph, name in cases}
    token = {case: np.abs(each).mean(axis=(1, 2)) for case, each in differences.items()}
    same = {case: (each == 0).mean(axis=(1, 2)) for case, each in differences.items()}
    ratios = {case: np.cumsum(each, axis=2)[:, :, LENGTHS - 1] for case, each in differences.items()}
    deviation = {case: np.sqrt((each**2).mean(axis=1)) for case, each in ratios.items()}
    beyond = {case: (np.abs(np.expm1(each)) > CLIP).mean(axis=1) for case, each in ratios.items()}
    widest = {case: np.exp(np.abs(each[:, :, -1])).max(axis=1) for case, each in ratios.items()}
    away = {case: np.abs(each - seen[FIRST, "float32"]).mean(axis=(1, 2)) for case, each in seen.items()}
    last = {case: each[:, -1] for case, each in deviation.items()}
    bits, factor, wider = (bfloat16_over_float16(each) for each in (away, token, last))
    holds, words = judged(token, away, deviation, beyond, same)
    changed = changed_factor(token, same)
    settled = LENGTHS[SETTLED:]
    return Found(
        words={
            **words,
            "alike": _ALIKE - 1,
            "nearer": {name: away["XLA", name] / away[FIRST, name] for name in KL},
            "bits": {graph: times(each) for graph, each in bits.items()},
            "factor": {graph: times(each) for graph, each in factor.items()},
            "changed": {graph: times(each) for graph, each in changed.items()},
            "divergence": {graph: times(each**2, ".0f") for graph, each in wider.items()},
        },
        rows=(
            (*case, same[case], token[case], away[case], last[case], widest[case], beyond[case][:, -1])
            for case in cases
        ),
        holds=holds,
        lines=[
            (
                _factors("from float32", [0, 1, 2], bits),
                _factors("character", [1, 2], factor),
                _factors("changed character", [1, 2], changed),
                _factors("sequence", [1, 2], wider),
            ),
            *(
                curves(
                    settled,
                    {
                        f"{graph}, {name}": values[graph, name][:, SETTLED:].T
                        for graph in GRAPHS
                        for name in FORMATS[1:]
                    },
                )
                for values in (deviation, beyond)
            ),
        ],
        measured=flat(
            {
                "difference": token,
                "from float32": {case: away[case] for case in cases},
                "largest ratio": widest,
                "same": same,
                "deviation": last,
                "factor": factor,
                "factor of the deviation": wider,
            }
        ),
    )


def judged(token: Seen, away: Seen, deviation: Seen, beyond: Seen, same: Seen) -> tuple[dict[str, Any], dict[str, Any]]:
    """Whether each claim holds, and what they say.

    Args:
        token: The mean difference of a character from the first graph [seeds], in nats.
        away: The same from the first graph in float32 [seeds], also of the first graph.
        deviation: The root mean square of the log ratios of sequences [seeds, lengths], in nats.
        beyond: The share of sequences whose ratio is further than `CLIP` from 1 [seeds, lengths].
        same: The share of characters with the same bits as in the first graph [seeds].
    """
    # A graph that changes the bits of few characters is nearly the first one.
    tells = {graph: all((1 - same[graph, name]).mean() >= _CHANGED for name in KL) for graph in GRAPHS}
    few = {graph: "" if so else "too few characters change" for graph, so in tells.items()}
    changed = changed_factor(token, same)
    exact = _of_changed(token, same, "float32", "float16")
    last = {case: each[:, -1] for case, each in deviation.items()}
    size, wide = (np.array([last[graph, name] for graph in GRAPHS]) for name in ("float16", "bfloat16"))
    ratio = KL["bfloat16"] / KL["float16"]
    # KL divergence is half of the mean square of log ratios where these are small.
    comparable = _near(wide**2 / 2, KL["bfloat16"], 4)
    growth = {
        name: np.log2(last["XLA", name] / deviation["XLA", name][:, SETTLED]) / (len(LENGTHS) - 1 - SETTLED)
        for name in ("float16", "bfloat16")
    }
    holds = {
        "bits": [_near(each, BITS) for each in bfloat16_over_float16(away).values()],
        "divergence": _near((wide / size) ** 2, ratio, 4) if comparable else None,
        "growth": [(each > 0.25) & (each < 0.75) for each in growth.values()],
        "float16": beyond["XLA", "float16"][:, -1] == 0,
        "bfloat16": beyond["XLA", "bfloat16"][:, -1] > 0,
    }
    words = {
        "kl_ratio": ratio,
        "too_little": "" if comparable else f" ({CONTEXT} given characters differ too little to compare)",
        "growth": growth,
        "few": {graph: said and f" ({said})" for graph, said in few.items()},
    }
    for what, factors in (("average", bfloat16_over_float16(token)), ("ratio", bfloat16_over_float16(last))):
        words[what] = {}
        for graph in GRAPHS:
            nearer = {name: away[graph, name] / away[FIRST, name] for name in KL}
            alike = _near(nearer["bfloat16"] / nearer["float16"], 1, _ALIKE)
            about = few[graph] or ("" if alike else "it treats the formats differently")
            more = factors[graph] > 1
            holds[f"{what}-{_SHORT[graph]}"] = None if about else more
            words[what][graph] = f"{more.sum()} of {len(more)}{about and f'; {about}'}"
    for graph, short in _SHORT.items():
        holds[f"changed-{short}"] = _near(changed[graph], BITS) if tells[graph] else None
        holds[f"exact-{short}"] = exact[graph] < 0.01 if tells[graph] else None
    return holds, words


def bfloat16_over_float16(seen: Seen) -> dict[str, np.ndarray]:
    """By graph: how many times as large something is in bfloat16 as in float16 [seeds]."""
    return {graph: seen[graph, "bfloat16"] / each for (graph, name), each in seen.items() if name == "float16"}


def changed_factor(token: Seen, same: Seen) -> dict[str, np.ndarray]:
    """By graph: how many times as far a character that changes is in bfloat16 as in float16 [seeds]."""
    return _of_changed(token, same, "bfloat16", "float16")


def _of_changed(token: Seen, same: Seen, name: str, other: str) -> dict[str, np.ndarray]:
    """By graph: the mean difference of those characters that change in a format, over that in another [seeds]."""
    change = {case: each / (1 - same[case]) for case, each in token.items() if case[1] in (name, other)}
    return {graph: change[graph, name] / change[graph, other] for graph in GRAPHS}


def _near(factors: np.ndarray, to: float, room: float = 2) -> bool:
    return bool((factors >= to / room).all() and (factors <= room * to).all())


def times(factors: np.ndarray, form: str = ".1f") -> str:
    """The geometric mean of factors, with the least and the greatest."""
    return with_range(*(f"{each:{form}}" for each in (np.exp(np.log(factors).mean()), factors.min(), factors.max())))


def _factors(label: str, x: Sequence[int], factors: Mapping[str, np.ndarray]) -> Line:
    """As `curve`, with geometric means."""
    line = curve(label, x, np.array(list(factors.values())))
    means = (np.exp(np.log(each).mean()) for each in factors.values())
    return dataclasses.replace(line, y=tuple(float(f"{mean:.6g}") for mean in means))


def _measure(seeds: int, steps: int) -> dict[tuple[str, str], np.ndarray]:
    """By graph and format: the log-probabilities, float64 [seeds, sequences, positions]."""
    task = text(context=CONTEXT, width=_WIDTH)
    starts = np.linspace(0, len(task.test_characters) - CONTEXT - 1, _SEQUENCES).astype(int)[:, None]
    given, following = (task.test_characters[starts + np.arange(CONTEXT) + later].astype(np.int32) for later in (0, 1))
    models = {name: task.model("float32" if name == "float32" else f"mixed_{name}") for name in FORMATS}
    graphs: dict[tuple[str, str], LogProbabilities] = {}
    for name, model in models.items():
        made = whole(model, xla=False), whole(model, xla=True), one_by_one(model)
        graphs |= {(graph, name): each for graph, each in zip((FIRST, *GRAPHS), made, strict=True)}
    found: dict[tuple[str, str], list[np.ndarray]] = {case: [] for case in graphs}
    for seed in range(seeds):
        optimizer = keras.optimizers.Adam(_RATE)
        weights = trained(task, seed, optimizer, steps, batch=_BATCH).model.get_weights()
        for model in models.values():
            model.set_weights(weights)
        for case, log_probabilities in graphs.items():
            found[case].append(log_probabilities(given, following).astype(np.float64))
    return {case: np.stack(each) for case, each in found.items()}


LogProbabilities = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of characters, int32 [batch, length], and the following ones: float32 [batch, length], in nats."""


def whole(model: keras.Model, *, xla: bool) -> LogProbabilities:
    """All positions at once, with a causal mask.

    Args:
        model: That of `loops.tasks.load("text")`.
        xla: Whether XLA compiles it.
    """
    # Traced explicitly: TensorFlow warns about functions that calls trace repeatedly.
    compiled = tf.function(lambda given: model(given, training=False), jit_compile=xla).get_concrete_function(
        tf.TensorSpec([None, model.input_shape[1]], tf.int32)
    )
    return lambda given, following: _chosen(compiled(tf.constant(given)), following)


def one_by_one(model: keras.Model) -> LogProbabilities:
    """A position after the other, as text is generated: each attends to the ones before, which are kept.

    Args:
        model: As in `whole`.
    """

    def logits(given: np.ndarray) -> tf.Tensor:
        step = _Step(model)
        tokens = tf.constant(given)
        return tf.concat([step(tokens[:, at : at + 1], at) for at in range(given.shape[1])], axis=1)

    return lambda given, following: _chosen(logits(given), following)


class _Step:
    """The layers of the model, applied to one position at a time; only attention looks at others."""

    def __init__(self, model: keras.Model):
        _, self._embedding, self._positions, *rest = model.layers
        kinds = keras.layers.LayerNormalization, keras.layers.MultiHeadAttention, keras.layers.Dense
        self._norms, self._attentions, self._dense = (
            [layer for layer in rest if isinstance(layer, kind)] for kind in kinds
        )
        self._kept: list[list[tf.Tensor]] = [[] for _ in self._attentions]

    def __call__(self, tokens: tf.Tensor, at: int) -> tf.Tensor:
        """Float32 logits [batch, 1, alphabet] for the characters [batch, 1] at a position."""
        x = self._embedding(tokens)
        x = x + tf.cast(self._positions.vectors[at], x.dtype)
        for block, (attention, kept) in enumerate(zip(self._attentions, self._kept, strict=True)):
            normal = self._norms[2 * block](x)
            kept.append(normal)
            x = x + attention(normal, tf.concat(kept, axis=1))
            widen, narrow = self._dense[2 * block : 2 * block + 2]
            x = x + narrow(widen(self._norms[2 * block + 1](x)))
        return tf.cast(self._dense[-1](self._norms[-1](x)), tf.float32)


def _chosen(logits: tf.Tensor, following: np.ndarray) -> np.ndarray:
    """In float32 for all of them, so that only the network differs."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant(following), tf.cast(logits, tf.float32))
    return -losses.numpy()
