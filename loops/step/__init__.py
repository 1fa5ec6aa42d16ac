"""The train step: its order, its arguments, and its window of micro-batches."""

from loops.step.arguments import ByAttempts as ByAttempts
from loops.step.composed_step import ComposedStep as ComposedStep
from loops.step.parts import Part as Part
from loops.step.train_step import TrainStep as TrainStep
