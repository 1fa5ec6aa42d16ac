"""Shows a running run in a terminal, from the files that it appends to."""

from loops.views.watch.watch import watch as watch
