"""What a run left behind, as arrays: its trace, its log of steps, and what it says of itself."""

from loops.recorded.reading import as_recorded as as_recorded
from loops.recorded.reading import read_run as read_run
from loops.recorded.run import Measured as Measured
from loops.recorded.run import Recorded as Recorded
