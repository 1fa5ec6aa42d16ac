"""Curves and histograms for TensorBoard."""

from loops.tensorboard.action import TensorBoard as TensorBoard
