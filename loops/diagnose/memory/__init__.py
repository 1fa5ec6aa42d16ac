"""The bytes of a training step, counted from its graph: what stays, and what is kept for the backward pass."""
