"""What every room may use: errors, checks, text, files that a run writes. Nothing of a run."""
