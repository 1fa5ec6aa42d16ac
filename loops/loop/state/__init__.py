"""What it takes to go on with a run as if it had never stopped, one part a file."""
