"""Helpers for every room: errors, checks, text, and files that a run writes. Nothing here knows of runs."""
