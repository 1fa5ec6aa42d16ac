"""From scaled gradients to updated weights: the decision, and the update it lets through or not."""
