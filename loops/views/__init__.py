"""Readers of recorded runs."""
