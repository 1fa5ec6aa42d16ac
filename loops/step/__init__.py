"""One train step, composed: its order, its arguments, its window of micro-batches."""

from loops.step.schedule import ByAttempts as ByAttempts
from loops.step.train_step import TrainStep as TrainStep
