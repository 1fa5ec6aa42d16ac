"""Curves and histograms for TensorBoard."""

from loops.record.tensorboard.action import TensorBoard as TensorBoard
