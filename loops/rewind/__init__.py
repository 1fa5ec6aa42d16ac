"""Any past step of a run, had again: the state just before it, its batch, and what the run wrote of it."""

from loops.rewind.log import read_log as read_log
from loops.rewind.moment import Moment as Moment
from loops.rewind.opened import open_run as open_run
from loops.rewind.replay import rewind as rewind
