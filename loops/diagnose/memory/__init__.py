"""Counts the bytes of a training step from its graph: its variables, and the tensors saved for the backward pass."""
