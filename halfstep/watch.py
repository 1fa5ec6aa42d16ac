"""`halfstep watch`: a running run in the terminal."""

from __future__ import annotations

import argparse
import contextlib

from halfstep.terminal import Console
from loops.views.watch import watch


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    # Ctrl-C says that the watcher has seen enough; the run goes on.
    with contextlib.suppress(KeyboardInterrupt):
        watch(options.folder, Console())
    return 0
