"""What a run left behind, as arrays: its trace, its log of steps, and what it says of itself."""

from loops.record.reading import as_recorded as as_recorded
from loops.record.reading import read_run as read_run
from loops.record.run import Measured as Measured
from loops.record.run import Recorded as Recorded
