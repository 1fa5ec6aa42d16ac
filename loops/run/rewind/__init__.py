"""Goes back to any past step of a run: the state just before it, its batch, and its row in the log."""

from loops.record.log import read_log as read_log
from loops.run.rewind.replay_point import ReplayPoint as ReplayPoint
from loops.run.rewind.rewind import open_run as open_run
from loops.run.rewind.rewind import rewind as rewind
