"""How far two graphs of one policy differ in bfloat16 and in float16, and what that makes of importance ratios."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import keras
import numpy as np

import scaler
from benchmarks.effects.decoding import LogProbabilities, one_by_one, whole
from benchmarks.effects.effect import Effect, Experiment, Line, Panel, curve, described, percent, spread
from benchmarks.effects.graph_claims import (
    BITS,
    CLIP,
    CONTEXT,
    FIRST,
    FORMATS,
    GRAPHS,
    KL,
    LENGTHS,
    RULE,
    SETTLED,
    SLOPES,
    changed_factor,
    claims_of,
    each_of,
)
from loops import tasks
from loops.loop.loop import Loop
from loops.step.train_step import TrainStep
from loops.tasks import TextTask

NAME = "second-graph"
_WIDTH = 32
_RATE, _BATCH = 3e-3, 32
_SEQUENCES = 64


def run(seeds: int = 5, steps: int = 100) -> Effect:
    """Trains a small transformer in float32, and takes the log-probabilities of held-out text from three graphs.

    Args:
        seeds: The number of networks.
        steps: The steps of training.
    """
    seen = _measure(seeds, steps)
    all_graphs = (FIRST, *GRAPHS)
    settled = LENGTHS[SETTLED:]
    cases = list(itertools.product(GRAPHS, FORMATS))
    differences = {(graph, name): seen[graph, name] - seen[FIRST, name] for graph, name in cases}
    token = {case: np.abs(each).mean(axis=(1, 2)) for case, each in differences.items()}
    same = {case: (each == 0).mean(axis=(1, 2)) for case, each in differences.items()}
    ratios = {case: np.cumsum(each, axis=2)[:, :, LENGTHS - 1] for case, each in differences.items()}
    deviation = {case: np.sqrt((each**2).mean(axis=1)) for case, each in ratios.items()}
    beyond = {case: (np.abs(np.expm1(each)) > CLIP).mean(axis=1) for case, each in ratios.items()}
    widest = {case: np.exp(np.abs(each[:, :, -1])).max(axis=1) for case, each in ratios.items()}
    away = {case: np.abs(each - seen[FIRST, "float32"]).mean(axis=(1, 2)) for case, each in seen.items()}
    factor = {graph: token[graph, "bfloat16"] / token[graph, "float16"] for graph in GRAPHS}
    changed = changed_factor(token, same)
    wider = {graph: deviation[graph, "bfloat16"][:, -1] / deviation[graph, "float16"][:, -1] for graph in GRAPHS}
    nearer = {name: away["XLA", name] / away[FIRST, name] for name in ("bfloat16", "float16")}
    return Effect(
        **described(
            NAME,
            kl_bfloat16=KL["bfloat16"],
            kl_float16=KL["float16"],
            kl_ratio=KL["bfloat16"] / KL["float16"],
            slopes_bfloat16=SLOPES["bfloat16"],
            slopes_float16=SLOPES["float16"],
            width=_WIDTH,
            context=CONTEXT,
            rate=_RATE,
            sequences=_SEQUENCES,
            rule=RULE,
            nearer_bfloat16=spread(nearer["bfloat16"], ".2f"),
            nearer_float16=spread(nearer["float16"], ".2f"),
            bits=BITS,
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                "distance of a character from float32: bfloat16's over float16's",
                f"no number; {BITS:.0f} by the bits",
                each_of({graph: away[graph, "bfloat16"] / away[graph, "float16"] for graph in all_graphs}),
            ),
            (
                "difference of a character from the first graph, likewise",
                "no number",
                each_of(factor),
            ),
            (
                "the same of characters that change",
                f"no number; {BITS:.0f} by the bits",
                each_of(changed),
            ),
            (
                "KL divergence of an answer, likewise (half the mean square of log ratios, where these are small; "
                f"here of {CONTEXT} given characters)",
                f"{KL['bfloat16'] / KL['float16']:.0f}",
                each_of({graph: each**2 for graph, each in wider.items()}, ".0f"),
            ),
        ),
        columns=(
            "second graph",
            "format",
            "characters with the bits of the first graph",
            "mean distance of a character from the first graph, nats",
            "from the first graph in float32, nats",
            f"root mean square of the log ratio of {CONTEXT} characters, nats",
            "largest such ratio, or its inverse",
            f"such ratios beyond 1 ± {CLIP}",
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
        claims=claims_of(token, away, deviation, beyond, same),
        panels=(
            Panel(
                "bfloat16's difference over float16's",
                "",
                "factor",
                (
                    _factors(
                        "from float32",
                        range(len(all_graphs)),
                        [away[g, "bfloat16"] / away[g, "float16"] for g in all_graphs],
                    ),
                    _factors("character", [1, 2], [factor[graph] for graph in GRAPHS]),
                    _factors("changed character", [1, 2], [changed[graph] for graph in GRAPHS]),
                    _factors("sequence", [1, 2], [wider[graph] for graph in GRAPHS]),
                ),
                log_y=10,
                reference=(BITS, f"bits: {BITS:.0f}"),
                ticks=all_graphs,
            ),
            *(
                Panel(
                    title,
                    "characters",
                    unit,
                    tuple(
                        curve(f"{graph}, {name}", settled, values[graph, name][:, SETTLED:].T)
                        for graph in GRAPHS
                        for name in FORMATS[1:]
                    ),
                    log_x=2,
                    log_y=log,
                )
                for title, unit, values, log in (
                    ("log ratio of a sequence", "root mean square, nats", deviation, 10),
                    (f"ratios beyond 1 ± {CLIP}", "share of sequences", beyond, 0),
                )
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
        | {f"factor {graph}": factor[graph].tolist() for graph in GRAPHS}
        | {f"factor of the deviation {graph}": wider[graph].tolist() for graph in GRAPHS},
    )


def _factors(label: str, x: Sequence[int], factors: Sequence[np.ndarray]) -> Line:
    """As `curve`, with geometric means."""
    line = curve(label, x, np.array(factors))
    return dataclasses.replace(line, y=tuple(float(f"{np.exp(np.log(each).mean()):.6g}") for each in factors))


def _measure(seeds: int, steps: int) -> dict[tuple[str, str], np.ndarray]:
    """By graph and format: the log-probabilities, float64 [seeds, sequences, positions]."""
    task = dataclasses.replace(_text(), context=CONTEXT, width=_WIDTH)
    starts = np.linspace(0, len(task.test_characters) - CONTEXT - 1, _SEQUENCES).astype(int)[:, None]
    given, following = (task.test_characters[starts + np.arange(CONTEXT) + later].astype(np.int32) for later in (0, 1))
    models = {name: task.model("float32" if name == "float32" else f"mixed_{name}") for name in FORMATS}
    graphs: dict[tuple[str, str], LogProbabilities] = {}
    for name, model in models.items():
        made = whole(model, xla=False), whole(model, xla=True), one_by_one(model)
        graphs |= {(graph, name): each for graph, each in zip((FIRST, *GRAPHS), made, strict=True)}
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


EXPERIMENT = Experiment(NAME, "two graphs of one policy, in bfloat16 and in float16", 100, run, seeds=5)
