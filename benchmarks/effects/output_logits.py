"""Output logits that drift away at high learning rates, with and without z-loss."""

from __future__ import annotations

import numpy as np

from benchmarks.effects.adam_copies import CLIPPED, Setup
from benchmarks.effects.effect import Claim, Effect, Experiment, Line, Panel, curve, described, spread
from benchmarks.effects.small_transformer import WARM, sensitivity
from benchmarks.effects.zero_layers import BATCH, WIDTH, Runs, train

NAME = "output-logits"
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
_NONE, _Z_LOSS, _DECAY = WAYS = ("neither", "z-loss", "weight decay")
_COEFFICIENT, _WEIGHT_DECAY = 1e-4, 1e-4
_BETA_2 = 0.95
_PUBLISHED_RATE = 0.1
_NEAR = 1.0
"""What counts as close to 0, and by how much two courses of log Z differ that have parted."""
_POINTS = 40
"""The points of a curve over steps."""


def run(seeds: int = 5, steps: int = 20_000) -> Effect:
    """Trains transformers of no layers at four learning rates: with z-loss, with weight decay, and with neither.

    Args:
        seeds: The number of networks for each way and rate.
        steps: The steps of each run.
    """
    settings = {_NONE: (0.0, 0.0), _Z_LOSS: (_COEFFICIENT, 0.0), _DECAY: (0.0, _WEIGHT_DECAY)}
    setups = [Setup(rate, _BETA_2, way=CLIPPED, decay=settings[way][1] / rate) for way in WAYS for rate in RATES]
    coefficients = [settings[way][0] for way in WAYS for _ in RATES]
    return effect_of(train(setups, coefficients, seeds=seeds, steps=steps), seeds, steps)


def effect_of(runs: Runs, seeds: int, steps: int) -> Effect:
    """The effect from its runs: for each of `WAYS` each of `RATES`.

    Args:
        runs: The runs.
        seeds: The number of seeds.
        steps: The steps of each run.
    """
    own = {way: slice(number * len(RATES), (number + 1) * len(RATES)) for number, way in enumerate(WAYS)}
    records = len(runs.log_z)
    tenth = max(1, records // 10)
    log_z = {way: runs.log_z[-tenth:, part].mean(axis=0) for way, part in own.items()}
    logit = {way: runs.logit[-tenth:, part].mean(axis=0) for way, part in own.items()}
    probability = np.array([(logit[way] - log_z[way]).mean(axis=1) for way in WAYS])
    ends = {way: runs.end[part] for way, part in own.items()}
    cost = {way: runs.rounded[part] - ends[way] for way, part in own.items()}
    sensitive = {way: sensitivity(ends[way], runs.first[part][0]) for way, part in own.items()}
    at = RATES.index(_PUBLISHED_RATE)
    plain, held = log_z[_NONE], log_z[_Z_LOSS]
    at_rate = {way: runs.log_z[:, part][:, at] for way, part in own.items()}
    decayed = (np.abs(log_z[_DECAY]) < np.abs(plain)).sum(axis=1)
    nearer = ", ".join(f"in {decayed[row]} of {seeds} seeds at {RATES[row]:g}" for row in range(at, len(RATES)))
    parted, half = _apart(at_rate[_NONE], at_rate[_Z_LOSS], steps)
    return Effect(
        **described(
            NAME,
            width=WIDTH,
            batch=BATCH,
            beta_2=_BETA_2,
            warm_percent=100 * WARM,
            weight_decay=_WEIGHT_DECAY,
            log_z=runs.log_z[0].mean(),
            least_probability=probability.min(),
            most_probability=probability.max(),
            near=_NEAR,
            published_rate=_PUBLISHED_RATE,
            plain=plain[at].mean(),
            held=held[at].mean(),
            bottom=RATES[0],
            top=RATES[-1],
            rise=ends[_NONE][-1].mean() - ends[_NONE][0].mean(),
            rise_z=ends[_Z_LOSS][-1].mean() - ends[_Z_LOSS][0].mean(),
            cost=max(values.mean(axis=1).max() for values in cost.values()),
        ),
        seeds=seeds,
        steps=steps,
        beside=(
            (
                f"mean output logit at a rate of {_PUBLISHED_RATE}, without z-loss and weight decay",
                "diverges, very negative",
                f"{spread(logit[_NONE][at], '.1f')}, of which log Z is {spread(plain[at], '.1f')}",
            ),
            (
                f"log Z at a rate of {_PUBLISHED_RATE} with z-loss",
                "close to 0 is the aim; the instability is resolved",
                spread(held[at], ".1f"),
            ),
            (
                f"when log Z parts from that with z-loss, and comes to half of its distance, at {_PUBLISHED_RATE}",
                "towards the end",
                f"{_steps(parted)} and {_steps(half)}, of {steps}",
            ),
            (
                "sensitivity to the learning rate, nats",
                "lower with z-loss",
                ", ".join(f"{way} {spread(values, '.3f')}" for way, values in sensitive.items()),
            ),
        ),
        columns=("learning rate", "", "log Z", "held-out loss, nats", "cost in bfloat16, nats"),
        rows=tuple(
            (
                f"{rate:g}",
                way,
                spread(log_z[way][row], ".1f"),
                spread(ends[way][row], ".3f"),
                spread(cost[way][row], ".1g"),
            )
            for row, rate in enumerate(RATES)
            for way in WAYS
        ),
        claims=(
            Claim(
                "without z-loss and weight decay output logits drift down, and more so at higher rates: log Z is lower "
                "at each rate than at the one before, on average.",
                bool((np.diff(plain.mean(axis=1)) < 0).all()),
            ),
            Claim(f"at {_PUBLISHED_RATE} log Z ends below 0, in each seed.", bool((plain[at] < 0).all())),
            Claim(
                f"that comes towards the end: at {_PUBLISHED_RATE} log Z has parted from that with z-loss, and come to "
                "half of its distance, in the second half of the run (our bound), in each seed.",
                _late(parted, half, steps) if (plain[at] < 0).all() else None,
            ),
            Claim(
                f"z-loss reaches its aim: at {_PUBLISHED_RATE} log Z is within {_NEAR:.0f} (our bound) of 0, in each "
                "seed.",
                bool((np.abs(held[at]) <= _NEAR).all()),
                published=False,
            ),
            Claim(
                f"from {_PUBLISHED_RATE} on log Z is nearer to 0 with z-loss than with neither, in each seed.",
                bool((np.abs(held[at:]) < np.abs(plain[at:])).all()),
            ),
            Claim(
                f"so it is with weight decay, on average, in this small network, too ({nearer}).",
                bool((np.abs(log_z[_DECAY][at:]).mean(axis=1) < np.abs(plain[at:]).mean(axis=1)).all()),
                published=False,
            ),
            Claim(
                "the drift makes the loss more sensitive to the learning rate: less so with z-loss, in each seed.",
                bool((sensitive[_Z_LOSS] < sensitive[_NONE]).all()),
            ),
        ),
        panels=(
            Panel(
                "log Z in the end",
                "highest learning rate",
                "log Z",
                tuple(curve(way, RATES, values) for way, values in log_z.items()),
                log_x=10,
                reference=(0.0, "aim of z-loss"),
            ),
            Panel(
                f"log Z at {_PUBLISHED_RATE}",
                "step",
                "log Z",
                tuple(_course(way, values, steps) for way, values in at_rate.items()),
            ),
            Panel(
                "held-out loss in the end",
                "highest learning rate",
                "nats per character",
                tuple(curve(way, RATES, values) for way, values in ends.items()),
                log_x=10,
            ),
        ),
        measured={
            f"{what} {way} {rate:g}": values[way][row].tolist()
            for what, values in (("log Z", log_z), ("logit", logit), ("loss", ends), ("cost in bfloat16", cost))
            for way in WAYS
            for row, rate in enumerate(RATES)
        }
        | {f"sensitivity {way}": values.tolist() for way, values in sensitive.items()}
        | {
            f"step at which log Z has parted from that with z-loss at {_PUBLISHED_RATE}": parted.tolist(),
            f"step at which it has half of its distance at {_PUBLISHED_RATE}": half.tolist(),
        },
    )


def _apart(plain: np.ndarray, held: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The steps from which log Z is more than `_NEAR`, and half of the distance in the end, below that with z-loss.

    Args:
        plain: log Z of each record without z-loss, [records, seeds].
        held: The same with it.
        steps: The steps of each run.

    Returns:
        Both for good, [seeds] each; NaN if they are not apart in the end.
    """
    distance = _smoothed(held) - _smoothed(plain)
    last = distance[-max(1, len(distance) // 10) :].mean(axis=0)
    found = []
    for least in (_NEAR, last / 2):
        below = len(distance) - (distance[::-1] <= least).argmax(axis=0)
        first = np.where((distance > least).all(axis=0), 0, below)
        found.append(np.where(last > _NEAR, (first + 0.5) * steps / len(distance), np.nan))
    return found[0], found[1]


def _late(parted: np.ndarray, half: np.ndarray, steps: int) -> bool | None:
    """Whether both lie in the second half of the run, in each seed; None if only one does, or nothing parts."""
    late = [bool((values > steps / 2).all()) for values in (parted, half)]
    if not np.isfinite(parted).all():
        return None
    return late[0] if late[0] == late[1] else None


def _steps(known: np.ndarray) -> str:
    known = known[np.isfinite(known)]
    return f"step {spread(known, '.0f')}" if len(known) else "in none"


def _smoothed(by_record: np.ndarray) -> np.ndarray:
    """Records [records, seeds], each a mean with its neighbours, so that curves can be told apart, [points, seeds]."""
    parts = np.array_split(np.asarray(by_record), min(_POINTS, len(by_record)))
    return np.array([part.mean(axis=0) for part in parts])


def _course(label: str, by_record: np.ndarray, steps: int) -> Line:
    means = _smoothed(by_record)
    return curve(label, (np.arange(len(means)) + 0.5) * steps / len(means), means)


EXPERIMENT = Experiment(
    NAME, "output logits that drift away at high learning rates, with and without z-loss", 20_000, run, 5
)
