"""The scales of a replay as a table."""

from __future__ import annotations

import csv
import os

from loops.replay.results import Replay
from loops.support.written.place import as_path, writing


def write_scales(found: Replay, path: str | os.PathLike) -> None:
    """Writes a CSV of the column `step` and a column of scales for each strategy, named as it is.

    Args:
        found: Of one trace: in several the same step has several scales.
        path: The file; it is replaced.

    Raises:
        NotWritable: If it cannot be written.
    """
    place = as_path("write_scales", "path", path)
    columns = [one.scales.tolist() for one in found.strategies]
    with writing("--scales", place), place.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *(one.strategy for one in found.strategies)])
        writer.writerows(zip(found.numbers.tolist(), *columns, strict=True))
