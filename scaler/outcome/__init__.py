"""What a step did, as tensors and in words, and when a run of skips is an error."""
