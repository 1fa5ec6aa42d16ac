"""Telling a person how far an autopsy is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], object]


def of_steps(progress: Progress) -> Callable[[int, int], object]:
    """Tells of the steps that are replayed."""
    return lambda done, total: progress(f"replayed {done} of {total} steps")


def counted(progress: Progress) -> Callable[[], None]:
    """Tells how often the step was taken."""
    taken = 0

    def told() -> None:
        nonlocal taken
        taken += 1
        progress(f"took the step {taken} times")

    return told
