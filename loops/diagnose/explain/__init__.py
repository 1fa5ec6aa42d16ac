"""Explains why a step was skipped: repeats it while every tensor is measured, and tries remedies."""
