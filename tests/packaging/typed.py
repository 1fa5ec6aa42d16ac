"""A program of a few lines in which a type checker finds nothing."""

import halfstep as hs
import loops
import scaler

print(scaler.LossScaler(scaler.Dynamic(initial_scale=2.0**10)), loops.Seconds(10.0))
print(hs.LossScaler(hs.Static(2.0**10)), hs.loops.Seconds(10.0))
print(hs.Seconds(10.0), hs.SpikeGuard, hs.observe.watch, hs.observe.read)
