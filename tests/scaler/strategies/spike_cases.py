"""`SpikeGuard` in plain Python, the words it is driven by, and the loop that drives it."""

import math

import numpy as np
from research_reference import f32
from strategy_cases import Runner

from scaler import Dynamic, Event

WINDOW = 5
INNER = Dynamic(8.0, growth_interval=3, min_scale=2.0**-4, max_scale=2.0**8)


class Guarded(Runner):
    """Runs words of events with a norm, a loss and a norm of each gradient, where there are any."""

    def _one(self, state, finite, statistic, numbers):
        norms = {"norms": statistic[2:]} if statistic.shape[0] > 2 else {}
        return self._make(**numbers).update(state, Event(finite, norm=statistic[0], loss=statistic[1], **norms))


def median(values):
    ordered = sorted(values)
    return f32((ordered[len(values) // 2] + ordered[(len(values) - 1) // 2]) * 0.5)


def limit_of(values, factor):
    """The median of a window, and the limit that follows from it."""
    usual = median(values)
    if usual == math.inf:
        return usual, math.inf
    with np.errstate(over="ignore"):
        distances = [float(abs(np.float32(value) - np.float32(usual))) for value in values]
    sigma, least = float(np.float32(1.4826)), float(np.float32(0.1))
    spread = max(f32(sigma * median(distances)), f32(least * abs(usual)))
    return usual, f32(usual + float(np.float32(factor)) * spread) if spread > 0 else math.inf


def reference(events, *, factor, largest=math.inf, by_tensor=None, tensors=0):
    """The guard around `INNER`, from its description, one number at a time."""
    scale, good, each = 8.0, 0, range(tensors)
    names = ["norm", "loss", *each]
    windows = {name: [math.inf] * WINDOW for name in names}
    limits = {name: (math.inf, largest if name == "norm" else math.inf) for name in names}
    spikes, in_a_row, last, trace = 0, 0, [0.0, 0.0, 0.0], []
    for finite, values in events:
        seen = dict(zip(names, map(f32, values), strict=True))
        # What clipped gradients are by rounding is no spike.
        most = {name: f32(limits[name][1] * (1 + 2**-10 * (name == "norm" and by_tensor == "clip"))) for name in names}
        above = [name for name in names if seen[name] > most[name]] if finite else []
        # Of several gradients it is the one that is the most times its limit.
        own = sorted((name for name in above if name in each), key=lambda name: -seen[name] / limits[name][1])
        why = [*(own if by_tensor == "skip" else []), *(name for name in above if name not in own)]
        if why:
            spikes, in_a_row = spikes + 1, in_a_row + 1
            usual, limit = limits[why[0]]
            fixed = why[0] == "norm" and limit == largest
            last = [seen[why[0]], math.nan if fixed else usual, limit]
        elif finite:
            in_a_row, good = 0, good + 1
            if good == 3:
                scale, good = min(scale * 2, 2.0**8), 0
            for name, window in windows.items():
                if math.isfinite(seen[name]):
                    windows[name] = [*window[1:], seen[name]]
                    usual, limit = limit_of(windows[name], factor)
                    limits[name] = usual, min(limit, largest) if name == "norm" else limit
        else:
            scale, good = max(scale / 2, 2.0**-4), 0
        trace.append(
            {
                "loss_scale": scale,
                "good_steps": good,
                "norms": windows["norm"],
                "norm_usual": limits["norm"][0],
                "norm_limit": limits["norm"][1],
                "losses": windows["loss"],
                "loss_usual": limits["loss"][0],
                "loss_limit": limits["loss"][1],
                "tensor_norms": [[windows[one][row] for one in each] for row in range(WINDOW)],
                "tensor_usual": [limits[one][0] for one in each],
                "tensor_limits": [limits[one][1] for one in each],
                "spikes": spikes,
                "spikes_in_a_row": in_a_row,
                "last_spike": last,
            }
        )
    return trace


def random_norms(rng, finite):
    """Norms that wander and jump, with stretches of zeros; and losses of both signs, some of them NaN."""
    walk = np.cumsum(rng.normal(0, 0.2, finite.shape), axis=0) + rng.uniform(-30, 60, finite.shape[1])
    walk += np.where(rng.random(finite.shape) < 0.15, rng.uniform(1, 12, finite.shape), 0.0)
    norms = np.where(rng.random(finite.shape) < 0.2, 0.0, 2.0**walk)
    norms = np.where(rng.random(finite.shape[1]) < 0.3, np.round(norms), norms)
    norms = np.where(finite, norms, rng.choice([np.inf, np.nan, 1.0], finite.shape))
    losses = rng.normal(rng.choice([0.0, 3.0, -3.0], finite.shape[1]), 0.5, finite.shape)
    losses += np.where(rng.random(finite.shape) < 0.1, rng.choice([50.0, np.nan, -50.0, np.inf], finite.shape), 0.0)
    return np.stack([norms, losses], axis=1).astype(np.float32)
