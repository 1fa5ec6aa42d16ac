"""When a scaler makes no progress, and what to do about it."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scaler.checks import check_count, check_flag, check_number
from scaler.errors import InvalidArgument, StuckError, StuckWarning

_ACTIONS = ("raise", "warn", "continue")


class Reading(NamedTuple):
    """A scaler's counters and scale, as the host read them at one moment: bad losses are skips because of the loss."""

    attempted: int
    skipped: int
    consecutive_skips: int
    loss_scale: float
    bad_losses: int = 0
    consecutive_bad_losses: int = 0


@dataclasses.dataclass(frozen=True)
class StuckPolicy:
    """When `LossScaler.check` finds a scaler stuck, and what it does then.

    Args:
        action: "raise" a `StuckError`, "warn" with a `StuckWarning` once each time it gets stuck, or "continue".
        consecutive_skips: Stuck after so many skipped steps in a row; None for never. From 2^40 down to 2^-14, the
            bounds of `Dynamic`, a scale that is halved each time takes 54.
        at_floor: Also stuck when a step was skipped at the strategy's `min_scale`, where nothing lower can be tried.
            A skip because of the loss does not count here: no scale helps it.
        at_ceiling: Also stuck when the scale is at the strategy's `max_scale`, where underflow can no longer be cured.
        skip_rate: Also stuck when more than this share of the last `over` attempted steps was skipped; None for never.
        consecutive_bad_losses: Also stuck after so many steps, since the last applied one, that were skipped because
            their loss was not finite; None for never. The loss scale stays at such a step, and waiting helps nothing.
        bad_loss_rate: Also stuck when more than this share of the last `over` attempted steps was skipped because of
            the loss; None for never.
        over: The number of last steps that both shares are measured over. How exactly depends on when the host visits.
            Nothing is concluded from fewer steps.

    The default share is above what a sound run skips at common settings. `Dynamic(growth_interval=1)`
    skips half of all steps for ever, and 0.635 of 200 when it comes down from 2^40 to 2^-14 first; with
    `hysteresis=2`, from 2^15, it is 0.685. A preset with its defaults skips at most 0.17 of any 200 while it looks for
    its level, and 0.02 from then on; `dalle` alone takes a hundred skips in a row for that. Two sound searches
    exceed it: `Dynamic(2.0**40, growth_interval=1, hysteresis=2)` with 0.73, and a growth factor of 4 that starts 25
    octaves too high with 0.705. Pass `skip_rate=None` for these. Of bad losses one batch in ten is below the default
    share, and one in four is above it.

    Restoring a checkpoint starts the count again, so that a repaired run can go on.

    Raises:
        InvalidArgument: For a value that cannot work.
    """

    action: str = "raise"
    _: dataclasses.KW_ONLY
    consecutive_skips: int | None = 100
    at_floor: bool = False
    at_ceiling: bool = False
    skip_rate: float | None = 0.7
    consecutive_bad_losses: int | None = 50
    bad_loss_rate: float | None = 0.2
    over: int = 200

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise InvalidArgument(f"StuckPolicy(action={self.action!r}): expected one of {', '.join(_ACTIONS)}.")
        for name, usual in (("consecutive_skips", 100), ("consecutive_bad_losses", 50)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), usual)
        for name in ("skip_rate", "bad_loss_rate"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "a share in (0, 1)", lambda v: 0 < v < 1)
        check_count("over", self.over, 200)
        check_flag("at_floor", self.at_floor)
        check_flag("at_ceiling", self.at_ceiling)

    def problem(self, readings: Sequence[Reading], min_scale: float, max_scale: float) -> str | None:
        """What is wrong, as the beginning of a sentence, or None.

        Args:
            readings: In the order they were made; the last one is the current one.
            min_scale: The strategy's floor.
            max_scale: Its ceiling. A scale that cannot move counts as neither at the floor nor at the ceiling.
        """
        now = readings[-1]
        moves = min_scale < max_scale
        bad = _share(readings, self.over, "bad_losses", self.bad_loss_rate)
        if self.consecutive_bad_losses is not None and now.consecutive_bad_losses >= self.consecutive_bad_losses:
            bad = f"{now.consecutive_bad_losses} steps since the last applied one were skipped"
        if bad:
            return f"{bad} {_BAD}"
        if self.consecutive_skips is not None and now.consecutive_skips >= self.consecutive_skips:
            last = "at" if now.consecutive_skips == 1 else "the last at"
            return f"{_in_a_row(now.consecutive_skips)}, {last} loss scale {now.loss_scale:g}"
        overflows = now.consecutive_skips > now.consecutive_bad_losses
        if self.at_floor and moves and overflows and now.loss_scale <= min_scale:
            return f"a step was skipped and the loss scale is at its floor, {min_scale:g}"
        if self.at_ceiling and moves and now.loss_scale >= max_scale:
            return f"the loss scale is at its ceiling, {max_scale:g}"
        return _share(readings, self.over, "skipped", self.skip_rate)


_BAD = (
    "because of a loss that was not finite, which no loss scale helps: look at the data, for a NaN, an infinity, an "
    "empty batch or a wrong label"
)


def _in_a_row(skips: int) -> str:
    return "the last step was skipped" if skips == 1 else f"{skips} steps in a row were skipped"


def _share(readings: Sequence[Reading], over: int, name: str, rate: float | None) -> str | None:
    """How many of the last steps were skipped, by the count `name`, if that is more than this share of them."""
    now = readings[-1]
    if rate is None or now.attempted - readings[0].attempted < over:
        return None
    later = itertools.takewhile(lambda reading: now.attempted - reading.attempted >= over, readings)
    *_, past = later  # The last one; a `History` has one.
    steps, skipped = now.attempted - past.attempted, getattr(now, name) - getattr(past, name)
    if skipped <= rate * steps:
        return None
    verb = "was" if skipped == 1 else "were"
    return f"{skipped} of the last {steps} steps {verb} skipped" if steps > 1 else _in_a_row(1)


class History:
    """The readings that a policy still needs: one from `over` steps ago, and all since."""

    def __init__(self, over: int):
        self._over = over
        self.readings: list[Reading] = [Reading(0, 0, 0, 0.0)]

    def add(self, reading: Reading) -> None:
        """Adds a reading, and forgets those that no later question needs."""
        if self.readings and reading.attempted < self.readings[-1].attempted:
            self.readings.clear()  # An earlier state was assigned.
        self.readings.append(reading)
        while len(self.readings) > 1 and reading.attempted - self.readings[1].attempted >= self._over:
            self.readings.pop(0)

    def begin(self, reading: Reading) -> None:
        """Starts from this reading, if nothing was checked yet: the steps before it are not judged."""
        if len(self.readings) == 1 and not self.readings[0].attempted:
            self.readings = [reading]

    def forget(self) -> None:
        """Starts again at the next reading: the steps before it are not judged."""
        self.readings.clear()


class Watch:
    """Follows one scaler's readings, and acts as the policy says when they show that it is stuck."""

    def __init__(self, policy: StuckPolicy):
        self.policy = policy
        self.history = History(policy.over)
        self._was_stuck = False

    def look(
        self,
        who: Callable[[], str],
        reading: Reading,
        min_scale: float,
        max_scale: float,
        reason: Callable[[], str],
        besides: str | None = None,
    ) -> None:
        """Raises, warns or does nothing.

        Args:
            who: Returns the beginning of the sentence, such as "The loss scaler with Dynamic()"; called only when
                something is wrong.
            reading: The current one.
            min_scale: The strategy's floor.
            max_scale: Its ceiling.
            reason: Returns the sentence about the last skip; called only when something is wrong.
            besides: What is wrong that the readings do not show, as the beginning of a sentence, or None.

        Raises:
            StuckError: If the scaler is stuck and the policy is to raise.
        """
        self.history.add(reading)
        problem = besides or self.policy.problem(self.history.readings, min_scale, max_scale)
        if problem and self.policy.action != "continue":
            message = f"{who()} is stuck: {problem}. {reason()}".strip()
            if self.policy.action == "raise":
                raise StuckError(message)
            if not self._was_stuck:
                warnings.warn(message, StuckWarning, stacklevel=4)
        self._was_stuck = problem is not None
