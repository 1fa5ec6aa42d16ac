"""Exit statuses; docs/commands.md explains them."""

from loops.support.signals import EXIT_INTERRUPTED as EXIT_INTERRUPTED
from loops.support.signals import EXIT_TERMINATED as EXIT_TERMINATED

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_SOME_FAILED = 3
"""Some runs of a study failed, and others finished."""
EXIT_FOUND = 4
"""What was looked at is not as it should be: lint found something that hurts, or probes change the run."""
EXIT_WORKER_LOST = 75
"""Another worker was lost: "try again", as sysexits.h has it."""
EXIT_CLOSED_PIPE = 141
"""Nobody reads the output any more: 128 + 13, as of a process that SIGPIPE ends."""
