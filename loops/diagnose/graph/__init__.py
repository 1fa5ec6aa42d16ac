"""Reads the traced graph of a step, and changes a model while it is traced."""
