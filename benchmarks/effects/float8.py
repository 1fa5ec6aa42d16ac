"""Gradients in float8 under delayed scaling, when their size jumps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import course, networks
from benchmarks.effects.effect import Claim, Effect, Experiment, Panel, course_of, described, percent

NAME = "float8"
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_HISTORIES = (1, 16, 1024)
_JUMP = 256.0
_UNSCALED = "no scale"
_LAYERS = len(networks.SIZES) - 1


def run(seeds: int = 3, steps: int = 900) -> Effect:
    """Trains with the gradients of activations in float8, each tensor scaled by the amax of past steps.

    From one third to two thirds of the run, the loss is multiplied by 256; the steps divide it out again.

    Args:
        seeds: The number of networks for each format and history.
        steps: The steps of each run.
    """
    cases: list[tuple[str, int | None]] = [(name, history) for name in _FORMATS for history in (None, *_HISTORIES)]
    up, down = steps // 3, 2 * steps // 3
    seen = _train(cases, seeds, steps, up, down)
    exact = course.train(
        [scaler.NoScaling()], seeds=seeds, steps=steps, forward_rounding=networks.exact, rounding=networks.exact
    )
    saturated, flushed = seen.saturated, seen.flushed
    jumped, after = saturated[up], flushed[down : min(steps, down + 16)].mean(axis=0)
    rest = flushed[min(steps - 1, down + 17) :].mean(axis=0)
    names = [_name(name, history) for name, history in cases]
    delayed = [at for at, (_, history) in enumerate(cases) if history]
    newest, middle, long = ([at for at, (_, history) in enumerate(cases) if history == n] for n in _HISTORIES)
    bare = [at for at, (_, history) in enumerate(cases) if history is None]
    next_steps = saturated[up + 1 : up + _LAYERS].mean(axis=0)
    later = saturated[up + _LAYERS : up + _LAYERS + 16].mean(axis=0)
    usual = saturated[up // 2 : up].mean(axis=0)
    e4m3, e5m2 = (flushed[:up, [at for at in delayed if cases[at][0] == name]].mean() for name in _FORMATS)
    return Effect(
        **described(NAME, jump=_JUMP, accuracy=percent(exact.accuracy), jumped=100 * jumped[delayed].mean()),
        seeds=seeds,
        steps=steps,
        beside=(
            ("largest and smallest value of E4M3", "448 and 2^-9", _range(_FORMATS[0])),
            ("largest and smallest value of E5M2", "57344 and 2^-16", _range(_FORMATS[1])),
            ("saturated by a jump of the gradients", "none", percent(jumped[delayed], ".1f")),
        ),
        columns=(
            "format",
            "history",
            "flushed before",
            "saturated before",
            "at the jump up",
            "flushed after the jump down",
            "later",
            "accuracy",
        ),
        rows=tuple(
            (
                name.removeprefix("float8_"),
                _UNSCALED if history is None else f"{history}",
                percent(flushed[:up, at].mean(axis=0)),
                percent(usual[at], ".3f"),
                percent(jumped[at], ".2f"),
                percent(after[at]),
                percent(rest[at]),
                percent(seen.accuracy[at]),
            )
            for at, (name, history) in enumerate(cases)
        ),
        claims=(
            Claim(
                "E5M2 flushes less than E4M3, as its range says "
                f"({100 * e5m2:.1f} % and {100 * e4m3:.1f} % before the jump).",
                bool(e5m2 < e4m3),
            ),
            Claim(
                f"a jump up costs one step ({percent(jumped[delayed], '.1f')} of the values saturate in it, and "
                f"{percent(next_steps[delayed], '.1f')} in the {_LAYERS - 1} after it).",
                bool(next_steps[delayed].mean() < jumped[delayed].mean() / 10),
                published=False,
            ),
            Claim(
                f"it costs one step for each layer: from {_LAYERS} steps after it on less than a tenth saturates.",
                bool((later[delayed].mean(axis=1) < jumped[delayed].mean(axis=1) / 10).all()),
                published=False,
            ),
            Claim(
                "a jump down costs as many steps as the history is long: in the first 16 a history of 16 flushes more "
                "than one of 1, and later less than one of 1024.",
                all(
                    bool(after[a].mean() < after[b].mean()) and bool(rest[b].mean() < rest[c].mean())
                    for a, b, c in zip(newest, middle, long, strict=True)
                ),
                published=False,
            ),
            Claim(
                "without a scale float8 flushes more than with any history.",
                all(
                    bool(flushed[:up, a].mean() > flushed[:up, b].mean())
                    for a in bare
                    for b in delayed
                    if cases[a][0] == cases[b][0]
                ),
                published=False,
            ),
            Claim(
                "without a scale the accuracy is at least one point lower than float32's.",
                bool((seen.accuracy[bare].mean(axis=1) < exact.accuracy.mean() - 0.01).all()),
                published=False,
            ),
            Claim(
                "with delayed scaling the accuracy stays within one point of float32's, in both formats.",
                bool(np.abs(seen.accuracy[delayed].mean(axis=1) - exact.accuracy.mean()).max() <= 0.01),
            ),
        ),
        panels=(
            Panel(
                "flushed",
                "step",
                "share of non-zero gradients",
                tuple(course_of(names[at], flushed[:, at]) for at in delayed),
            ),
            Panel(
                "saturated at the jump up",
                "step, from five before the jump",
                "share of values",
                tuple(course_of(names[at], saturated[up - min(up, 5) : up + 15, at], 20) for at in delayed),
            ),
        ),
        measured={
            f"{kind} {name}": values[at].tolist()
            for at, name in enumerate(names)
            for kind, values in (("saturated", jumped), ("flushed after", after), ("accuracy", seen.accuracy))
        },
    )


class _Seen(NamedTuple):
    """Shares lost in the casts [steps, cases, seeds], of non-zero values and of all; accuracy [cases, seeds]."""

    flushed: np.ndarray
    saturated: np.ndarray
    accuracy: np.ndarray


def _train(cases: Sequence[tuple[str, int | None]], seeds: int, steps: int, up: int, down: int) -> _Seen:
    problem = networks.digits()
    layers = range(_LAYERS)
    strategies: list[scaler.Strategy] = [
        scaler.Static(1.0)
        if history is None
        else scaler.DelayedAmax(format=name, history_length=history, min_scale=2.0**-60, max_scale=2.0**60)
        for name, history in cases
    ]

    @tf.function(autograph=True)
    def run() -> tuple:
        weights = networks.start(seeds, len(cases))
        states = [[course.stacked(each.init(), seeds) for each in strategies] for _ in layers]
        momenta = [tf.zeros_like(weight) for weight in weights]
        rows = tf.TensorArray(tf.float32, steps)
        for step in tf.range(steps):
            images, labels = networks.batch(problem, step, seeds, len(cases))
            factor = tf.fill([len(cases) * seeds], tf.where(tf.logical_and(step >= up, step < down), _JUMP, 1.0))
            casts: dict[int, _Cast] = {}

            def cut(layer: int, delta: tf.Tensor, states: list = states, casts: dict = casts) -> tf.Tensor:
                scale = tf.concat([state.loss_scale for state in states[layer]], axis=0)
                casts[layer] = _cast([name for name, _ in cases], seeds, delta, scale)
                return casts[layer].values

            seen = networks.backward(weights, images, labels, factor, networks.exact, networks.exact, cut)
            states = [
                [
                    strategy.update(state, scaler.Event(tf.fill([seeds], True), amax))
                    for strategy, state, amax in zip(
                        strategies, states[layer], tf.split(casts[layer].amax, len(cases)), strict=True
                    )
                ]
                for layer in layers
            ]
            weights, momenta = course.descend(weights, momenta, seen.grads, factor, tf.fill(factor.shape, True))
            lost = networks.share([casts[layer].flushed for layer in layers])
            given = networks.share([casts[layer].given for layer in layers])
            rows = rows.write(step, tf.stack([lost / given, networks.share([casts[layer].cut for layer in layers])]))
        return weights, rows.stack()

    weights, rows = run.get_concrete_function()()
    shape = (len(cases), seeds)
    flushed, saturated = np.moveaxis(rows.numpy().reshape(steps, 2, *shape), 1, 0)
    accuracy = networks.evaluate(weights, problem.test_images, problem.test_labels)[1]
    return _Seen(flushed, saturated, accuracy.numpy().reshape(shape))


class _Cast(NamedTuple):
    """A tensor cast to float8 and back; for each value, whether it was flushed, saturated, and non-zero before."""

    values: tf.Tensor
    amax: tf.Tensor
    flushed: tf.Tensor
    cut: tf.Tensor
    given: tf.Tensor


def _cast(names: Sequence[str], seeds: int, values: tf.Tensor, scale: tf.Tensor) -> _Cast:
    """Values [cases * seeds, batch, units], scaled, each case in its own format."""
    scaled = values * scale[:, None, None]
    parts, limits = [], []
    for name, part in zip(names, tf.split(scaled, len(names)), strict=True):
        parts.append(scaler.formats.rounded(part, name, saturate=True))
        limits.append(tf.fill([seeds, 1, 1], scaler.float_format(name).max))
    rounded, given = tf.concat(parts, axis=0), values != 0
    return _Cast(
        values=rounded / scale[:, None, None],
        amax=networks.largest([values]),
        flushed=tf.logical_and(rounded == 0, given),
        cut=tf.abs(scaled) > tf.concat(limits, axis=0),
        given=given,
    )


def _range(name: str) -> str:
    known = scaler.float_format(name)
    return f"{known.max:g} and 2^{np.log2(known.smallest_subnormal):.0f}"


def _name(name: str, history: int | None) -> str:
    return f"{name.removeprefix('float8_')}, {_UNSCALED if history is None else f'history {history}'}"


EXPERIMENT = Experiment(NAME, "float8 gradients under delayed scaling, through jumps", 900, run)
