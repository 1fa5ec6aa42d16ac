"""Files and folders that a run writes: errors of writing, and locks against a second run."""
