"""Any past step of a run, had again: the state just before it, its batch, and what the run wrote of it."""

from loops.record.log import read_log as read_log
from loops.run.rewind.moment import Moment as Moment
from loops.run.rewind.open import open_run as open_run
from loops.run.rewind.rewind import rewind as rewind
