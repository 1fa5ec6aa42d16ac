"""Actions, one file each: what a loop does when it visits the host."""

from loops.actions.checkpoint import Checkpoint as Checkpoint
from loops.actions.jsonl import JsonLines as JsonLines
from loops.actions.progress import Progress as Progress
