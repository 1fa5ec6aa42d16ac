"""Set-ups compared on a task, with a report."""
