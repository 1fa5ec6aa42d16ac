"""Actions: what a loop does when it visits the host."""

from loops.actions.call import Call as Call
from loops.actions.call import StopWhen as StopWhen
from loops.actions.checkpoint import Checkpoint as Checkpoint
from loops.actions.evaluate import Best as Best
from loops.actions.evaluate import EarlyStop as EarlyStop
from loops.actions.evaluate import Evaluate as Evaluate
from loops.actions.profile import Profile as Profile
from loops.actions.progress import Progress as Progress
from loops.actions.rewind import Rewind as Rewind
from loops.loop.visit import Seconds as Seconds
