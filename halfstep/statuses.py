"""Exit statuses; docs/commands.md explains them."""

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_SOME_FAILED = 3
"""Some runs of a study failed, and others finished."""
EXIT_FOUND = 4
"""A problem was found: lint reports one, or probes change the run."""
EXIT_WORKER_LOST = 75
"""Another worker was lost: EX_TEMPFAIL ("try again") of sysexits.h."""
EXIT_INTERRUPTED = 130
"""After SIGINT: 128 + 2, as in shells."""
EXIT_CLOSED_PIPE = 141
"""The reader of the output is gone: 128 + 13, as for a process that SIGPIPE ends."""
EXIT_TERMINATED = 143
"""After SIGTERM: 128 + 15."""
