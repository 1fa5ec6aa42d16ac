"""The state of a run that a checkpoint saves, one part per file."""
