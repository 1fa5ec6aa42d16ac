"""Several processes that train one model together."""

from loops.workers.join import join_workers as join_workers
from loops.workers.workers import Workers as Workers
