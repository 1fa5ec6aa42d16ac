"""One run on a task, from its options to its files."""

from loops.run.train import POLICIES as POLICIES
from loops.run.train import RunOptions as RunOptions
from loops.run.train import train as train
