"""Actions, one file each: what a loop does when it visits the host."""

from loops.actions.jsonl import JsonLines as JsonLines
from loops.actions.progress import Progress as Progress
