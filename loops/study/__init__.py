"""Compares set-ups on a task, with a report."""
