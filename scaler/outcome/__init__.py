"""What a step did, as tensors and in words, and when a run of skips is an error."""

from scaler.outcome.outcome import Cause as Cause
from scaler.outcome.outcome import Outcome as Outcome
