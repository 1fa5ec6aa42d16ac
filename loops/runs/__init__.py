"""One run on a task, from its options to its files."""

from loops.runs.run import POLICIES as POLICIES
from loops.runs.run import RunOptions as RunOptions
from loops.runs.run import train as train
