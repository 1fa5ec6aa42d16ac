"""What is known to hurt in 16 bits, found before training: each layer stressed, the set-up looked at."""

from loops.diagnose.lint.finding import Finding as Finding
from loops.diagnose.lint.look import lint as lint
