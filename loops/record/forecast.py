"""Warns of a run that seems to diverge, while it runs or from its trace, from either of two kinds of evidence.

Growth: the gradients are as large as they ever were, while the loss rises. In healthy runs gradients also grow, while
the loss falls fast, and the loss may rise for a while. Where other data begins both grow at once, and then fall: so a
loss that jumps begins a new count of the lowest loss.

Headroom: activations or weights are larger than they ever were and, on a line through the last steps, overflow soon.
docs/forecast.md has the figures.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import scaler
from loops.loop.visit import Visit
from loops.record.trace.tensors import Tensor, tensors_of
from loops.record.trace.visit_columns import columns_of, seen_in
from loops.step.parts import parts_in
from loops.support.errors import DivergenceWarning, ResumeWarning

if TYPE_CHECKING:
    from loops.loop.loop import Loop

_GRADIENTS = ("activation_gradients", "weight_gradients")
MEAN_OF = 8
"""The critical scale is averaged over so many steps."""
LOSS_OF = 16
"""The loss is averaged over so many steps: it varies more between batches."""
LAG = 16
"""The mean critical scale, or the headroom, is compared with the lowest of so many steps ago."""
RISE = 0.4
"""How far the loss must have risen, as a share of its lowest value."""
SHARE = 0.05
"""How far it must have risen as a share of its first value: near 0 every loss fluctuates."""
JUMP, JUMP_OF = 3.0, 32
"""Other data begins where the loss is so many times the largest of so many steps before."""
LINE_OF = 16
"""The line through the headroom of so many steps says when it will be used up."""
AHEAD = 100
"""In how many steps at most."""
BELOW = 0.5
"""How many octaves the end of the line must lie below the lowest headroom."""
PARTS, PART = 4, 0.5
"""Each of so many parts of the line must fall below the one before by this share of what they fall on average."""
_MIDDLE = (LINE_OF - 1) / 2
_SLOPE = tuple((at - _MIDDLE) * 12 / (LINE_OF * (LINE_OF**2 - 1)) for at in range(LINE_OF))
"""The slope of the least squares line is the sum of the values with these weights."""


class Evidence(enum.Enum):
    """What an alarm rests on."""

    GROWTH = "growth"
    """The gradients are as large as ever, and the loss has risen."""
    HEADROOM = "headroom"
    """Activations or weights are larger than ever, and overflow soon if they grow on as they do."""


class Alarm(NamedTuple):
    """Why a run may be diverging. Steps are counted in those that were measured.

    Attributes:
        step: The step of the alarm.
        left: Octaves from the step's largest gradient, at the step's loss scale, to an overflow; 0 if it overflowed.
        headroom: Octaves from the step's largest activation or weight to an overflow; NaN if none was measured.
        rise: How far the loss had risen, as a share of its lowest value since other data began.
        evidence: What the alarm rests on.
        above: Octaves by which the largest gradients of the last 8 steps lie above those of all steps, both as means.
        rising: How many steps ago the loss, a mean of 16, was at its lowest.
        within: In how many steps activations or weights overflow if they grow on; infinite if they do not grow.
    """

    step: int
    left: float
    headroom: float
    rise: float
    evidence: Evidence
    above: float
    rising: int
    within: float

    def __str__(self) -> str:
        if self.evidence is Evidence.GROWTH:
            why = (
                f"its gradients are as large as ever, {self.above:.1f} octaves above their mean, and its loss has "
                f"risen by {self.rise:.0%} over its lowest of {self.rising} steps ago"
            )
        else:
            why = (
                f"its activations or weights are larger than ever, and overflow in about {self.within:.0f} steps if "
                f"they grow on as in the last {LINE_OF}"
            )
        # It is not known where only gradients are watched.
        others = "" if math.isnan(self.headroom) else f", activations and weights {self.headroom:.0f}"
        return (
            f"at step {self.step} the run may be diverging: {why}. Gradients have {self.left:.0f} octaves left before "
            f"they overflow at this loss scale{others}. Lower the learning rate, or clip, or look at the data."
        )


class Seen(NamedTuple):
    """The state of a forecast.

    Attributes:
        critical: Log2 of the critical scale at the last `MEAN_OF` steps.
        loss: The loss at the last `JUMP_OF` steps.
        lows: The lowest mean of `critical` so far, at each of the last `LAG` + 1 steps.
        best: The lowest mean loss since other data began.
        first: The first mean loss.
        fresh: Steps since other data began, `LOSS_OF` at most.
        rising: Steps since the mean loss was `best`.
        usual: The mean of all log2 critical scales.
        steps: Of how many.
        headroom: The headroom at the last `LINE_OF` steps.
        heads: The lowest headroom so far, at each of the last `LAG` + 1 steps.
        measured: Steps whose headroom was seen, twice `LINE_OF` at most.
    """

    critical: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()
    lows: tuple[float, ...] = ()
    best: float = math.inf
    first: float = math.inf
    fresh: int = 0
    rising: int = 0
    usual: float = 0.0
    steps: int = 0
    headroom: tuple[float, ...] = ()
    heads: tuple[float, ...] = ()
    measured: int = 0

    @property
    def above(self) -> float:
        """Octaves by which the last gradients lie above their mean."""
        return self.usual - sum(self.critical) / len(self.critical) if self.critical else 0.0

    @property
    def mean_loss(self) -> float:
        """That of the last `LOSS_OF` steps."""
        return sum(self.loss[-LOSS_OF:]) / LOSS_OF

    @property
    def rise(self) -> float:
        """How far the mean loss lies above its lowest, as a share of that."""
        if math.isinf(self.best):
            return 0.0
        risen = self.mean_loss - self.best
        return risen / abs(self.best) if self.best else math.inf if risen > 0 else 0.0


def look(seen: Seen, critical: float, loss: float) -> tuple[Seen, bool]:
    """The state after a step, and whether growth is a reason for alarm.

    Args:
        seen: The state before the step.
        critical: The critical scale, finite and above 0.
        loss: The loss, finite.
    """
    size, steps = math.log2(critical), seen.steps + 1
    last = (*seen.critical, size)[-MEAN_OF:]
    mean, lows = sum(last) / len(last), seen.lows
    if len(last) == MEAN_OF:
        lows = (*lows, min([mean, *lows[-1:]]))[-LAG - 1 :]
    other = len(seen.loss) >= LOSS_OF and loss > JUMP * max(seen.loss) > 0
    after = seen._replace(
        critical=last,
        loss=(*seen.loss, loss)[-JUMP_OF:],
        lows=lows,
        best=math.inf if other else seen.best,
        fresh=1 if other else min(seen.fresh + 1, LOSS_OF),
        rising=seen.rising + 1,
        usual=seen.usual + (size - seen.usual) / steps,
        steps=steps,
    )
    if after.fresh == LOSS_OF and after.mean_loss <= after.best:
        first = after.mean_loss if math.isinf(after.first) else after.first
        after = after._replace(best=after.mean_loss, rising=0, first=first)
    if len(lows) <= LAG or math.isinf(after.best) or mean > lows[0]:
        return after, False
    return after, after.rise >= RISE and after.mean_loss - after.best >= SHARE * abs(after.first)


def look_ahead(seen: Seen, headroom: float) -> tuple[Seen, float]:
    """The state after a step, and in how many steps the headroom is used up, if it is lower than ever; else infinity.

    Args:
        seen: The state before the step.
        headroom: Octaves from the largest activation or weight to an overflow; not NaN.
    """
    # How far an overflow went is unknown, so it is neither a point of the line nor the lowest headroom.
    size = headroom if math.isfinite(headroom) else math.inf
    last = (*seen.headroom, size)[-LINE_OF:]
    heads = (*seen.heads, min([size, *seen.heads[-1:]]))[-LAG - 1 :]
    count = min(seen.measured + 1, 2 * LINE_OF)
    after = seen._replace(headroom=last, heads=heads, measured=count)
    if count < 2 * LINE_OF or math.inf in last:
        return after, math.inf
    slope = sum(map(operator.mul, _SLOPE, last))
    end = sum(last) / LINE_OF + slope * _MIDDLE
    if slope >= 0 or end > heads[0] - BELOW or not _steady(last):
        return after, math.inf
    return after, max(end, 0.0) / -slope


def _steady(headroom: tuple[float, ...]) -> bool:
    """Whether it falls all along, rather than at once, as it does where other data begins."""
    size = len(headroom) // PARTS
    means = [sum(headroom[at : at + size]) / size for at in range(0, len(headroom), size)]
    least = PART * (means[0] - means[-1]) / (PARTS - 1)
    return all(before - after >= least for before, after in itertools.pairwise(means))


def forecast(steps: Any) -> Alarm | None:
    """The first step of a trace at which the run seems to diverge; None if there is none.

    Args:
        steps: The columns `step`, `loss`, `loss_scale`, `critical_low`, `critical_high` and `headroom` of a trace, from
            the run's first step on: `loops.observe.read(path).steps`, its DataFrame, or a dict of arrays.

    Raises:
        scaler.InvalidArgument: If a column is missing, or a step.
    """
    names = ("step", "loss", "loss_scale", "critical_low", "critical_high", "headroom")
    try:
        columns = {name: np.asarray(steps[name], np.float64) for name in names}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise scaler.InvalidArgument(
            f"forecast: expected the columns {', '.join(names)}, as in hs.observe.read(path).steps."
        ) from error
    if any(values.ndim != 1 or len(values) != len(columns["step"]) for values in columns.values()):
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in columns.items())
        raise scaler.InvalidArgument(f"forecast: got columns of the shapes {shapes}: expected a number for each step.")
    if len(columns["step"]) and columns["step"][0] != 1:
        raise scaler.InvalidArgument(
            f"forecast: the steps begin with {columns['step'][0]:.0f}, but the forecast depends on earlier gradients: "
            "expected all steps from 1 on."
        )
    gaps = np.flatnonzero(np.diff(columns["step"]) != 1)
    if len(gaps):
        before, after = columns["step"][gaps[0]], columns["step"][gaps[0] + 1]
        raise scaler.InvalidArgument(
            f"forecast: step {after:.0f} follows step {before:.0f}: expected every step from 1 on, in order."
        )
    critical = columns["critical_low"]
    # It is infinite if no measured tensor carries the scale, and 0 at an overflow.
    if len(critical) and (np.isnan(critical) | np.isposinf(critical)).all():
        raise scaler.InvalidArgument(
            "forecast: the trace has no critical scales, because no gradients were measured: expected one of a "
            "TrainStep(..., probes=hs.observe.watch(model))."
        )
    return _fold(Seen(), columns)[1]


def _fold(seen: Seen, columns: Mapping[str, np.ndarray]) -> tuple[Seen, Alarm | None]:
    """The state after these steps, or after the first that is a reason for alarm, and the alarm."""
    critical, loss, scale = columns["critical_low"], columns["loss"], columns["loss_scale"]
    # The size of the gradients is unknown for a step that overflowed, and for one whose gradients are all zero.
    known = (critical > 0) & np.isfinite(critical) & np.isfinite(columns["critical_high"]) & np.isfinite(loss)
    measured = ~np.isnan(columns["headroom"])
    for row in np.flatnonzero(known | measured):
        grows, within, headroom = False, math.inf, float(columns["headroom"][row])
        if measured[row]:
            seen, within = look_ahead(seen, headroom)
        if known[row]:
            seen, grows = look(seen, float(critical[row]), float(loss[row]))
        if grows or within <= AHEAD:
            evidence = Evidence.GROWTH if grows else Evidence.HEADROOM
            left = math.log2(critical[row] / scale[row]) if critical[row] > 0 else 0.0
            step = int(columns["step"][row])
            return seen, Alarm(step, left, headroom, seen.rise, evidence, seen.above, seen.rising, within)
    return seen, None


def _as_json(value: Any) -> Any:
    """The value, or a list of these, with None in the place of infinity, which JSON lacks."""
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    return None if value == math.inf else value


def _from_json(value: Any) -> Any:
    """What `_as_json` was given."""
    if isinstance(value, list):
        return tuple(_from_json(one) for one in value)
    return math.inf if value is None else value


class Forecast:
    """Runs `forecast` during a run, and warns once, with a `DivergenceWarning`, when the run seems to diverge.

    It checks at each visit, so with `steps_per_call=100` it may warn 99 steps late. It needs a train step with probes
    of gradients, and must see a run from its first step on, or resume from a `Checkpoint` that has its state.
    """

    chief_only = True

    def __init__(self) -> None:
        self._seen = Seen()
        self._warned = self._began = False
        self._train_step: Any = None
        self._tensors: list[Tensor] = []

    def begin(self, loop: Loop) -> None:
        """Before the first step: makes sure that the train step has probes.

        Raises:
            scaler.InvalidArgument: If it has none.
        """
        if parts_in(loop.train_step):
            raise scaler.InvalidArgument(
                "Forecast: a ComposedStep has no loss of its own that could rise: expected a TrainStep. Let it see the "
                "parts in TensorBoard, or in the report of an hs.Trace."
            )
        probes = getattr(loop.train_step, "probes", None)
        if probes is None:
            raise scaler.InvalidArgument(
                "Forecast: the train step has no probes, which measure gradients: expected "
                "TrainStep(..., probes=hs.observe.watch(model))."
            )
        kinds = getattr(probes, "kinds", _GRADIENTS)
        if not {*kinds} & {*_GRADIENTS}:
            raise scaler.InvalidArgument(
                f"Forecast: the probes measure {', '.join(kinds)}, but it needs gradients: expected a watch whose "
                f"kinds include {' or '.join(_GRADIENTS)}."
            )
        self._train_step = loop.train_step

    def save_state(self) -> dict:
        """The state of the forecast, for a `Checkpoint`."""
        seen = {name: _as_json(value) for name, value in self._seen._asdict().items()}
        return {"warned": self._warned, "began": self._began, "seen": seen}

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        self._warned, self._began = value["warned"], value["began"]
        self._seen = Seen(**{name: _from_json(one) for name, one in value["seen"].items()})

    def __call__(self, visit: Visit) -> None:
        """Checks the steps of a visit."""
        if self._warned:
            return
        if visit.first > 1 and not self._began:
            self._warned = True
            warnings.warn(
                f"Forecast: it begins at step {visit.first}, but the forecast depends on earlier gradients. It will "
                "not warn: let it see a run from its first step on.",
                ResumeWarning,
                stacklevel=2,
            )
            return
        self._began = True
        self._tensors = self._tensors or tensors_of(self._train_step)
        columns = columns_of(visit, self._tensors, self._train_step, seen_in(visit, self._train_step))
        step = visit.first + np.arange(len(columns["critical_low"]))
        self._seen, alarm = _fold(self._seen, {**columns, "step": step})
        if alarm:
            self._warned = True
            warnings.warn(str(alarm), DivergenceWarning, stacklevel=2)
