"""Finds known 16-bit problems before training: stresses each layer, and checks the set-up and the traced graph."""

from loops.diagnose.lint.all_rules import lint as lint
from loops.diagnose.lint.finding import Finding as Finding
