"""A program of three lines in which a type checker finds nothing."""

import loops
import scaler

print(scaler.LossScaler(scaler.Dynamic(initial_scale=2.0**10)), loops.Seconds(10.0))
