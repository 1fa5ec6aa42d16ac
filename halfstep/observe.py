"""`halfstep observe`: whether observing a run changes it."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import tempfile
from typing import Any

from halfstep.statuses import EXIT_FOUND
from loops.diagnose.verify import verify
from loops.record.files import to_json
from loops.support.user_function import called


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="halfstep-observe-") as place:

        def build() -> Any:
            run = pathlib.Path(place) / str(next(numbers))
            run.mkdir()
            return called(options.build, run)

        found = verify(build, options.steps)
    print(to_json({"neutral": found.neutral, **dataclasses.asdict(found)}) if options.json else found)
    return 0 if found.neutral else EXIT_FOUND
