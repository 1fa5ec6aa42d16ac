"""What is wrong with a step, a model or a machine."""
