"""The best result of an evaluation so far, and the end of a run that no longer improves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loops.actions.evaluate import Evaluate
from loops.loop.visit import Visit
from loops.support.checks import check, check_count
from loops.support.errors import LoopError

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class Best:
    """Follows one metric of an `Evaluate`. An `EarlyStop` and a `Checkpoint` may share one.

    A NaN is never better: it counts as an evaluation without improvement.

    Args:
        evaluate: One of the same loop's actions, before those that use this.
        metric: The name of one of its metrics.
        mode: "min" or "max", whichever is better.
        min_delta: The smallest change that counts as an improvement, in the metric's units.

    Attributes:
        value: The best result, or None before there is one.
        step: The step of the best result, 0 before there is one.
        since: The number of evaluations since then.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, evaluate: Evaluate, metric: str, mode: str = "min", *, min_delta: float = 0.0):
        check(f"Best({evaluate!r})", isinstance(evaluate, Evaluate), "an hs.Evaluate")
        check(f"Best(metric={metric!r})", metric in evaluate.metric_names, f"one of {', '.join(evaluate.metric_names)}")
        check(f"Best(mode={mode!r})", mode in ("min", "max"), "'min' or 'max', whichever is better")
        check(f"Best(min_delta={min_delta!r})", min_delta >= 0, "a number of at least 0")
        self._evaluate, self._metric, self._mode, self._min_delta = evaluate, metric, mode, float(min_delta)
        self.value: float | None = None
        self.step = self.since = self._seen = 0
        # Another min_delta goes on with the best result: it was one.
        known = f"{mode} {metric} of {evaluate.name}"
        self.state_keys = [f"{known}, by {self._min_delta!r}", known]

    def check(self, loop: Loop, user: str) -> None:
        """Makes sure that the evaluation belongs to the loop.

        Raises:
            LoopError: If it does not.
        """
        if self._evaluate not in loop.actions:
            raise LoopError(
                f"{user}: the hs.Evaluate that it follows is not among the loop's actions. Put it before it."
            )

    def look(self) -> None:
        """Reads a new result, if there is one."""
        if self._evaluate.step == self._seen or self._metric not in self._evaluate.results:
            return
        self._seen = self._evaluate.step
        result, sign = self._evaluate.results[self._metric], 1 if self._mode == "min" else -1
        better = result == result if self.value is None else sign * result < sign * self.value - self._min_delta
        if better:
            self.value, self.step, self.since = result, self._seen, 0
        else:
            self.since += 1

    def describe(self) -> str:
        """The best result in words."""
        if self.value is None:
            return f"{self._metric} was never a number"
        return f"the best {self._metric}, {self.value:g}, is that of step {self.step}"

    def save_state(self) -> dict:
        """The state, for the actions that use this."""
        # As text: a result may be infinite, and JSON has no infinities.
        return {
            "value": None if self.value is None else str(self.value),
            "step": self.step,
            "since": self.since,
            "seen": self._seen,
        }

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        self.value = None if value["value"] is None else float(value["value"])
        self.step, self.since, self._seen = value["step"], value["since"], value["seen"]


class EarlyStop:
    """Ends the run, as if its goal were reached, after `patience` evaluations without an improvement.

    A metric that is NaN is not an improvement. A run that resumes from a checkpoint of a stopped one stops at once.

    Args:
        best: The metric to follow.
        patience: The number of consecutive evaluations without improvement that ends the run.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, best: Best, *, patience: int = 3):
        check(f"EarlyStop({best!r})", isinstance(best, Best), "an hs.Best, such as hs.Best(evaluate, 'loss')")
        check_count(f"EarlyStop(patience={patience!r})", patience)
        self._best, self._patience = best, patience
        self.state_keys, self.state_of = best.state_keys, best

    @property
    def stopped(self) -> str | None:
        """Why the run should end, or None."""
        if self._best.since < self._patience:
            return None
        return f"no improvement in {self._best.since} evaluations: {self._best.describe()}"

    def begin(self, loop: Loop) -> None:
        """Before the first step: makes sure that the evaluation is one of the loop's actions.

        Raises:
            LoopError: If it is not.
        """
        self._best.check(loop, "EarlyStop")

    def __call__(self, visit: Visit) -> None:
        """Reads the newest results."""
        self._best.look()

    def save_state(self) -> dict:
        """The best result and the evaluations since, for a `Checkpoint`."""
        return self._best.save_state()

    def load_state(self, value: dict) -> None:
        """Restores what `save_state` returned."""
        self._best.load_state(value)
