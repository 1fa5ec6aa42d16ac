"""Replays strategies over recorded steps: the scales that each would have had, its skips, and how sure that is."""

from loops.replay.intervals import Intervals as Intervals
from loops.replay.replay import replay as replay
from loops.replay.results import Replay as Replay
from loops.replay.results import Replayed as Replayed
