"""A run's trace: what each step was, and what its values were, in a file that tools outside can read."""

from loops.record.trace.action import Trace as Trace
from loops.record.trace.reading import TraceTables as TraceTables
from loops.record.trace.reading import read as read
