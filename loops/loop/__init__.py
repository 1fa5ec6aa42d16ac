"""The outer loop: steps, visits, what it counts, several workers, and what a checkpoint holds."""

from loops.loop.loop import Loop as Loop
