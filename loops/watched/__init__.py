"""A running run in a terminal, from the files that it appends to."""

from loops.watched.watch import watch as watch
