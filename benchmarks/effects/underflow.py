"""The share of gradients below float16's range, by layer."""

from __future__ import annotations

import keras
import numpy as np

import scaler
from benchmarks.effects.effect import Found, curves, flat
from benchmarks.effects.runs import by_exponent, flushed, nonzero, trained, visible
from loops import tasks

_EVERY = 10
_RATE = 0.05
_SCALES = {2.0**-10: "2^-10", 1.0: "1", 8.0: "8", 128.0: "128"}
"""The first scale stands for a loss that is a thousand times smaller."""
_EXPONENTS = range(-40, 1)
_KINDS = _ACTIVATIONS, _WEIGHTS = "activation_gradients", "weight_gradients"
_SHORT = {"BatchNormalization": "BatchNorm"}


def run(seeds: int, steps: int) -> Found:
    """Counts the gradients of a convolutional network by exponent while it trains in float32.

    Args:
        seeds: The number of networks.
        steps: The steps of each run.
    """
    found = [_count(seed, steps) for seed in range(seeds)]
    counts = {name: np.stack([each[name] for each in found]) for name in found[0]}
    activations, kernels = (
        {name: counts[name] for name in counts if name.endswith(" (kernel)") == kernel} for kernel in (False, True)
    )
    all_activations, all_weights = (np.sum(list(each.values()), axis=0) for each in (activations, kernels))
    layers = activations | kernels
    zeros, of_weights = _zeros(all_activations), _below(all_weights)
    behind_relu = _zeros(np.sum([each for name, each in activations.items() if "BatchNorm" in name], axis=0))
    all_lost = [_flushed(all_activations, scale).mean() for scale in _SCALES]
    smaller = _flushed(all_weights, next(iter(_SCALES)))
    return Found(
        words={
            "flushed": all_lost[1],
            "smaller_first": all_lost[0],
            "smaller_second": smaller.mean(),
            "smaller": smaller,
            "zeros": zeros,
            "behind_relu": behind_relu,
            "of_weights": of_weights,
            "layers": [name.partition(" (")[0] for name in activations],
        },
        rows=(
            (name, _zeros(each), _below(each), _between(each, -27, -24), *(_flushed(each, scale) for scale in _SCALES))
            for name, each in {**layers, "**all activations**": all_activations, "**all weights**": all_weights}.items()
        ),
        holds={
            "relu": behind_relu.mean() > 0.5,
            "zeros": zeros > (1 - zeros) * _flushed(all_activations),
            "weights": of_weights.mean() > 0.005,
            "fewer": of_weights < _below(all_activations),
            "band": _between(all_activations, -27, -24) > 0.001,
            "eight": all_lost[2] <= 0.5 * all_lost[1],
        },
        lines=[
            curves(
                range(len(activations)),
                {
                    f"scale {said}": visible(np.array([_flushed(each, scale) for each in activations.values()]))
                    for scale, said in _SCALES.items()
                },
            ),
            curves(
                _EXPONENTS,
                {
                    "of activations": by_exponent(all_activations, _EXPONENTS),
                    "of weights": by_exponent(all_weights, _EXPONENTS),
                },
            ),
        ],
        measured=flat(
            {
                what: {name: share(each) for name, each in layers.items()}
                for what, share in (("true zeros", _zeros), ("below 2^-24", _below), ("flushed", _flushed))
            }
        ),
    )


def _count(seed: int, steps: int) -> dict[str, np.ndarray]:
    """Counts int64 [280] of each row, over the run."""
    optimizer = keras.optimizers.SGD(_RATE)
    model, names, visits = trained(tasks.load("digits"), seed, optimizer, steps, kinds=_KINDS, every=_EVERY)
    summed = np.sum([visit.vectors["counts"].sum(axis=0) for visit in visits], axis=0)
    wanted = _names(model)
    return {wanted[name]: summed[at] for at, name in enumerate(names) if name in wanted}


def _names(model: keras.Model) -> dict[str, str]:
    """The names of rows here, by Keras's names, whose numbers go on from model to model."""
    kinds: dict[str, int] = {}
    found = {}
    for layer in model.layers:
        kind = type(layer).__name__
        kinds[kind] = kinds.get(kind, 0) + 1
        said = f"{_SHORT.get(kind, kind)} {kinds[kind]}"
        if kind in ("Conv2D", "BatchNormalization", "ReLU", "Dense"):
            found[f"{_ACTIVATIONS}/{layer.name}"] = said
        found[f"{_WEIGHTS}/{layer.name}/kernel"] = f"{said} (kernel)"
    return found


def _zeros(counts: np.ndarray) -> np.ndarray:
    return counts[:, scaler.observe.ZERO] / counts.sum(axis=1)


def _below(counts: np.ndarray) -> np.ndarray:
    return _between(counts, scaler.observe.LOWEST, -24)


def _between(counts: np.ndarray, low: int, high: int) -> np.ndarray:
    first, last = scaler.observe.bin_of(low), scaler.observe.bin_of(high)
    return counts[:, first:last].sum(axis=1) / nonzero(counts)


def _flushed(counts: np.ndarray, scale: float = 1.0) -> np.ndarray:
    return flushed(counts, "float16", scale)
