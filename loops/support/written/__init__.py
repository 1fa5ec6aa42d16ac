"""Files and folders that a run writes: refused where they cannot be written, and held by one run at a time."""
