"""Several processes that train one model together."""

from loops.loop.workers.workers import Workers as Workers
from loops.loop.workers.workers import join_workers as join_workers
