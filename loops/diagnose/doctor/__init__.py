"""Where a training step's time and memory go, measured, and what was tried against it."""
