"""Estimates how long a study takes, by the runs that it has done."""

from __future__ import annotations

from collections.abc import Sequence

from loops.study.setups import Setup
from loops.support.text import amount


class Estimate:
    """The seconds of the runs of a study.

    A run takes as long as those of its set-up, or else as those of the set-ups with its dtype policy, or else as all
    but those in float32: on a CPU 16 bits may take twenty times as long.

    Args:
        setups: The set-ups, in the order of their runs.
        seeds: How many runs each has.
    """

    def __init__(self, setups: Sequence[Setup], seeds: int):
        self._setups, self._seeds = setups, seeds
        self._seconds: list[list[float]] = []

    def ran(self, setup: int, seconds: float) -> str | None:
        """Records a run.

        Args:
            setup: The position of its set-up.
            seconds: How long it took.

        Returns:
            A sentence after the first run of a set-up, unless all is done then: what all runs take, and what is left.
        """
        if setup == len(self._seconds):
            self._seconds.append([])
        self._seconds[setup].append(seconds)
        runs, done = len(self._setups) * self._seeds, sum(map(len, self._seconds))
        if len(self._seconds[setup]) > 1 or done == runs:
            return None
        each = [self._of_one(place) for place in range(len(self._setups))]
        known = [seconds for seconds in each if seconds is not None]
        so_far = f"study: {done} of {runs} runs done"
        if len(known) < len(each):
            return f"{so_far}, about {duration(known[0])} each in float32; in 16 bits they may take far longer"
        whole = self._seeds * sum(known)
        left = whole - sum(map(sum, self._seconds))
        return f"{so_far}, about {duration(whole)} for all, {duration(left)} left"

    def _of_one(self, setup: int) -> float | None:
        """The seconds of one run of a set-up; None if nothing tells."""
        if setup < len(self._seconds):
            return sum(self._seconds[setup]) / len(self._seconds[setup])
        done = list(zip(self._setups, self._seconds, strict=False))
        policy = self._setups[setup].policy
        alike = [own for one, own in done if one.policy == policy]
        others = alike or [own for one, own in done if one.policy != "float32"]
        runs = [seconds for own in others for seconds in own]
        return sum(runs) / len(runs) if runs else None


def duration(seconds: float) -> str:
    """A rough time in words: seconds up to one and a half minutes, then minutes."""
    return amount(max(1, round(seconds)), "second") if seconds < 90 else amount(round(seconds / 60), "minute")
