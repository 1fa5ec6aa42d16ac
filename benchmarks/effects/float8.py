"""Gradients in float8 under delayed scaling, when their size jumps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from benchmarks.effects import networks
from benchmarks.effects.effect import Found, course_of, flat

_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_HISTORIES = (1, 16, 1024)
_JUMP = 256.0
_UNSCALED = "no scale"
_LAYERS = len(networks.SIZES) - 1
_CASES = [(name, history) for name in _FORMATS for history in (None, *_HISTORIES)]
"""The formats, each with no scale and with each history."""


def run(seeds: int, steps: int) -> Found:
    """Trains with the gradients of activations in float8, each tensor scaled by the amax of past steps.

    From one third to two thirds of the run, the loss is multiplied by 256; the steps divide it out again.

    Args:
        seeds: The number of networks for each format and history.
        steps: The steps of each run.
    """
    up, down = steps // 3, 2 * steps // 3
    saturated, flushed, accuracy = _train(seeds, steps, up, down)
    exact = networks.train(
        [scaler.NoScaling()], seeds=seeds, steps=steps, forward_rounding=networks.exact, rounding=networks.exact
    ).accuracy
    jumped, after = saturated[up], flushed[down : min(steps, down + 16)].mean(axis=0)
    rest = flushed[min(steps - 1, down + 17) :].mean(axis=0)
    before, usual = flushed[:up].mean(axis=0), saturated[up // 2 : up].mean(axis=0)
    next_steps = saturated[up + 1 : up + _LAYERS].mean(axis=0)
    later = saturated[up + _LAYERS : up + _LAYERS + 16].mean(axis=0)
    forms = [(name.removeprefix("float8_"), f"{history or _UNSCALED}") for name, history in _CASES]
    names = [f"{name}, {history if history == _UNSCALED else f'history {history}'}" for name, history in forms]
    delayed = [at for at, (_, history) in enumerate(_CASES) if history]
    # Means over the seeds by format and by history, the first of which is none.
    means, means_after, means_rest, means_accuracy = (
        each.mean(axis=1).reshape(len(_FORMATS), -1) for each in (before, after, rest, accuracy)
    )
    e4m3, e5m2 = means[:, 1:].mean(axis=1)
    return Found(
        words={
            "accuracy": exact[0],
            "mean_jumped": jumped[delayed].mean(),
            "jumped": jumped[delayed],
            "next_steps": next_steps[delayed],
            "next_count": _LAYERS - 1,
            "ranges": [_range(name) for name in _FORMATS],
            "e4m3": e4m3,
            "e5m2": e5m2,
        },
        rows=((*form, *each) for form, *each in zip(forms, before, usual, jumped, after, rest, accuracy, strict=True)),
        holds={
            "range": e5m2 < e4m3,
            "one": next_steps[delayed].mean() < jumped[delayed].mean() / 10,
            "layers": later[delayed].mean(axis=1) < jumped[delayed].mean(axis=1) / 10,
            "down": (means_after[:, 1] < means_after[:, 2]) & (means_rest[:, 2] < means_rest[:, 3]),
            "unscaled": means[:, :1] > means[:, 1:],
            "lower": means_accuracy[:, 0] < exact.mean() - 0.01,
            "delayed": np.abs(means_accuracy[:, 1:] - exact.mean()) <= 0.01,
        },
        lines=[
            [course_of(names[at], flushed[:, at]) for at in delayed],
            [course_of(names[at], saturated[up - min(up, 5) : up + 15, at], 20) for at in delayed],
        ],
        measured=flat({"saturated": jumped, "flushed after": after, "accuracy": accuracy}, names),
    )


def _train(seeds: int, steps: int, up: int, down: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The shares of all values that saturate and of others than zero that are flushed, [steps, cases, seeds] both.

    And the accuracy, [cases, seeds].
    """
    problem, shape = networks.digits(), (len(_CASES), seeds)
    strategies: list[scaler.Strategy] = [
        scaler.Static(1.0)
        if history is None
        else scaler.DelayedAmax(format=name, history_length=history, min_scale=2.0**-60, max_scale=2.0**60)
        for name, history in _CASES
    ]

    def start() -> tuple:
        weights = networks.start(seeds, len(_CASES))
        states = [[networks.stacked(each.init(), seeds) for each in strategies] for _ in range(_LAYERS)]
        return weights, [tf.zeros_like(weight) for weight in weights], states

    def take(step: tf.Tensor, state: tuple) -> tuple:
        weights, momenta, states = state
        images, labels = networks.batch(problem, step, seeds, len(_CASES))
        factor = tf.fill([len(_CASES) * seeds], tf.where(tf.logical_and(step >= up, step < down), _JUMP, 1.0))
        casts: list[_Cast] = []

        def cut(layer: int, delta: tf.Tensor) -> tf.Tensor:
            scale = tf.concat([state.loss_scale for state in states[layer]], axis=0)
            casts.insert(0, _cast(seeds, delta, scale))
            return casts[0].values

        seen = networks.backward(weights, images, labels, factor, networks.exact, networks.exact, cut)
        states = [
            [
                strategy.update(state, scaler.Event(tf.fill([seeds], True), amax))
                for strategy, state, amax in zip(strategies, own, tf.split(cast.amax, len(_CASES)), strict=True)
            ]
            for own, cast in zip(states, casts, strict=True)
        ]
        weights, momenta = networks.descend(weights, momenta, seen.grads, factor, tf.fill(factor.shape, True))
        saturated, lost, given = (
            networks.share([getattr(cast, part) for cast in casts]) for part in ("cut", "flushed", "given")
        )
        return (weights, momenta, states), tf.stack([saturated, lost / given])

    (weights, *_), rows = networks.over_steps(steps, start, take)
    saturated, flushed = np.moveaxis(rows.reshape(steps, 2, *shape), 1, 0)
    accuracy = networks.evaluate(weights, problem.test_images, problem.test_labels)[1]
    return saturated, flushed, accuracy.numpy().reshape(shape)


class _Cast(NamedTuple):
    """A tensor cast to float8 and back; for each value, whether it was flushed, saturated, and non-zero before."""

    values: tf.Tensor
    amax: tf.Tensor
    flushed: tf.Tensor
    cut: tf.Tensor
    given: tf.Tensor


def _cast(seeds: int, values: tf.Tensor, scale: tf.Tensor) -> _Cast:
    """Values [cases * seeds, batch, units], scaled, each case in its own format."""
    scaled = values * scale[:, None, None]
    parts, limits = [], []
    for (name, _), part in zip(_CASES, tf.split(scaled, len(_CASES)), strict=True):
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
