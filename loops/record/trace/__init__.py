"""A run's trace: the numbers and histograms of each step, as an Arrow stream."""

from loops.record.trace.action import Trace as Trace
from loops.record.trace.file import TraceTables as TraceTables
from loops.record.trace.file import read as read
