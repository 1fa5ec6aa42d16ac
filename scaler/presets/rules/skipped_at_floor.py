"""When a scaler that cannot go lower is asked to: where DeepSpeed and fairseq raise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scaler.checks import check_count
from scaler.outcome.stuck import Reading, StuckPolicy


@dataclasses.dataclass(frozen=True)
class SkippedAtFloor(StuckPolicy):
    """Stuck when a step was skipped that was attempted at the floor already.

    `StuckPolicy(at_floor=True)` finds that the floor was *reached*. This compares two visits of the host: the scale was
    at the floor at both, and the last step was skipped. With a visit after each step that is the step it is about; with
    fewer visits, it is found at the next visit.

    Args:
        in_a_row: Only when at least so many steps in a row were skipped.
    """

    consecutive_skips: int | None = None
    skip_rate: float | None = None
    consecutive_bad_losses: int | None = None
    bad_loss_rate: float | None = None
    in_a_row: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("in_a_row", self.in_a_row, 1)

    def problem(self, readings: Sequence[Reading], min_scale: float, max_scale: float) -> str | None:
        """What is wrong, as the beginning of a sentence, or None."""
        if len(readings) > 1 and readings[-2].attempted and min_scale < max_scale:
            before, now = readings[-2:]
            at_floor = max(before.loss_scale, now.loss_scale) <= min_scale
            if at_floor and now.attempted > before.attempted and now.consecutive_skips >= self.in_a_row:
                return f"a step was skipped that was attempted at the lowest loss scale, {min_scale:g}"
        return super().problem(readings, min_scale, max_scale)
