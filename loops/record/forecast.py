"""A warning before a run diverges: its gradients are the largest so far while its loss rises.

When a run diverges its gradients grow, so its critical scale falls. In healthy runs the critical scale also falls,
while the loss falls fast, and the loss may rise for a while. Both at the same time were only seen in diverging runs:
docs/trace.md has the figures.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import scaler
from loops.loop.visit import Visit
from loops.record.trace.tensors import Tensor, tensors_of
from loops.record.trace.visit_columns import columns_of
from loops.step.composed_step import ComposedStep
from loops.support.errors import DivergenceWarning, ResumeWarning

if TYPE_CHECKING:
    from loops.loop.loop import Loop

_GRADIENTS = ("activation_gradients", "weight_gradients")
MEAN_OF = 8
"""The critical scale is averaged over so many steps."""
LOSS_OF = 16
"""The loss is averaged over so many steps: it varies more between batches."""
LAG = 16
"""The mean critical scale is compared with the lowest of so many steps ago."""
RISE = 0.4
"""How far the loss must have risen, as a share of its lowest value."""
SHARE = 0.05
"""How far it must have risen as a share of its first value: near 0 every loss fluctuates."""


class Alarm(NamedTuple):
    """Why a run may be diverging.

    Attributes:
        step: The step of the alarm.
        left: Octaves from the step's largest gradient, at the step's loss scale, to an overflow.
        headroom: Octaves from the step's largest activation or weight to an overflow.
        rise: How far the loss had risen, as a share of its lowest value.
    """

    step: int
    left: float
    headroom: float
    rise: float

    def __str__(self) -> str:
        return (
            f"at step {self.step} the run may be diverging: its gradients are as large as ever, and its loss has risen "
            f"by {self.rise:.0%} over its lowest. Gradients have {self.left:.0f} octaves left before they overflow at "
            f"this loss scale, activations and weights {self.headroom:.0f}. Lower the learning rate, or clip."
        )


class Seen(NamedTuple):
    """The state of a forecast.

    Attributes:
        critical: Log2 of the critical scale at the last `MEAN_OF` steps.
        loss: The loss at the last `LOSS_OF` steps.
        lows: The lowest mean of `critical` so far, at each of the last `LAG` + 1 steps.
        best: The lowest mean loss so far.
        first: The first mean loss.
    """

    critical: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()
    lows: tuple[float, ...] = ()
    best: float = math.inf
    first: float = math.inf


def look(seen: Seen, critical: float, loss: float) -> tuple[Seen, float | None]:
    """The state after a step, and the rise of the loss if it is a reason for alarm.

    Args:
        seen: The state before the step.
        critical: The critical scale, finite and above 0.
        loss: The loss, finite.
    """
    last, losses = (*seen.critical, math.log2(critical))[-MEAN_OF:], (*seen.loss, loss)[-LOSS_OF:]
    lows, best, first = seen.lows, seen.best, seen.first
    mean, mean_loss = sum(last) / len(last), sum(losses) / len(losses)
    if len(last) == MEAN_OF:
        lows = (*lows, min([mean, *lows[-1:]]))[-LAG - 1 :]
    if len(losses) == LOSS_OF:
        best, first = min(best, mean_loss), mean_loss if math.isinf(first) else first
    after = Seen(last, losses, lows, best, first)
    if len(lows) <= LAG or math.isinf(best) or mean > lows[0]:
        return after, None
    risen = mean_loss - best
    rise = risen / abs(best) if best else math.inf if risen > 0 else 0.0
    return after, rise if rise >= RISE and risen >= SHARE * abs(first) else None


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
            f"forecast: expected the columns {', '.join(names)}, as in loops.observe.read(path).steps."
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
            "TrainStep(..., probes=scaler.observe.watch(model))."
        )
    return _fold(Seen(), columns)[1]


def _fold(seen: Seen, columns: Mapping[str, np.ndarray]) -> tuple[Seen, Alarm | None]:
    """The state after these steps, or after the first that is a reason for alarm, and the alarm."""
    critical, loss, scale = columns["critical_low"], columns["loss"], columns["loss_scale"]
    # The size of the gradients is unknown for a step that overflowed, and for one whose gradients are all zero.
    known = (critical > 0) & np.isfinite(critical) & np.isfinite(columns["critical_high"]) & np.isfinite(loss)
    for row in np.flatnonzero(known):
        seen, rise = look(seen, float(critical[row]), float(loss[row]))
        if rise is not None:
            left = math.log2(critical[row] / scale[row])
            return seen, Alarm(int(columns["step"][row]), left, float(columns["headroom"][row]), rise)
    return seen, None


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
        if isinstance(loop.train_step, ComposedStep):
            raise scaler.InvalidArgument(
                "Forecast: a ComposedStep has no loss of its own that could rise: expected a TrainStep. Let it see the "
                "parts in TensorBoard, or in the report of a loops.Trace."
            )
        probes = getattr(loop.train_step, "probes", None)
        if probes is None:
            raise scaler.InvalidArgument(
                "Forecast: the train step has no probes, which measure gradients: expected "
                "TrainStep(..., probes=scaler.observe.watch(model))."
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
        seen = self._seen
        # JSON has no infinities.
        best, first = (None if math.isinf(value) else value for value in (seen.best, seen.first))
        return {
            "warned": self._warned,
            "began": self._began,
            "recent": [list(seen.critical), list(seen.loss), list(seen.lows)],
            "best": best,
            "first": first,
        }

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        best, first = (math.inf if one is None else one for one in (value["best"], value.get("first")))
        critical, loss, lows = (tuple(recent) for recent in value["recent"])
        self._warned, self._began = value["warned"], value["began"]
        self._seen = Seen(critical, loss, lows, best, first)

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
        columns = columns_of(visit, self._tensors, self._train_step)
        step = visit.first + np.arange(len(columns["critical_low"]))
        self._seen, alarm = _fold(self._seen, {**columns, "step": step})
        if alarm:
            self._warned = True
            warnings.warn(str(alarm), DivergenceWarning, stacklevel=2)
