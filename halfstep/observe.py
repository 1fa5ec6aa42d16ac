"""What `scaler.observe` and `loops.observe` have: statistics and probes of tensors; causes of skips, lint, replays."""

from loops.observe import *  # noqa: F403
from scaler.observe import *  # noqa: F403
