"""One run on a task, from its options to its files."""

from loops.runs.run import CHECKPOINTS as CHECKPOINTS
from loops.runs.run import POLICIES as POLICIES
from loops.runs.run import RunOptions as RunOptions
from loops.runs.run import to_json as to_json
from loops.runs.run import train as train
from loops.runs.run import write_json as write_json
