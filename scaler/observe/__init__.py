"""What the values of a tensor are, and what a number format would make of them."""
