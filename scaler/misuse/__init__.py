"""The loss scale as a unit: which of its powers are factors of a tensor, and what that says is wrong with a step."""
