"""A run's trace: what each step was, and what its values were, in a file that tools outside can read."""

from loops.trace.action import Trace as Trace
from loops.trace.reading import TraceTables as TraceTables
from loops.trace.reading import read as read
