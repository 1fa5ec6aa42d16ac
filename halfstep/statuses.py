"""Exit statuses; docs/commands.md explains them."""

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_SOME_FAILED = 3
"""Some runs of a study failed, and others finished."""
EXIT_FOUND = 4
"""What was looked at is not as it should be: lint found something that hurts, or probes change the run."""
EXIT_WORKER_LOST = 75
"""Another worker was lost: "try again", as sysexits.h has it."""
EXIT_INTERRUPTED = 130
"""After SIGINT: 128 + 2, as shells say it."""
EXIT_CLOSED_PIPE = 141
"""Nobody reads the output any more: 128 + 13, as of a process that SIGPIPE ends."""
EXIT_TERMINATED = 143
"""After SIGTERM: 128 + 15."""
