"""A run's files: their writers, and their readers, which return a recorded run as arrays."""

from loops.record.reading import as_recorded as as_recorded
from loops.record.reading import read_run as read_run
from loops.record.steps import Measured as Measured
from loops.record.steps import Recorded as Recorded
