"""Several processes that train one model together."""

from loops.loop.workers.join import join_workers as join_workers
from loops.loop.workers.workers import Workers as Workers
