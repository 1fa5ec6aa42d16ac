"""What a traced graph says of a step, and a model changed for as long as it is traced."""
