"""Five mistakes that a type checker finds where it sees the types of all three packages."""

import halfstep as hs
import loops
import scaler

scaler.Dynamic(initial_scale="large")
loops.Progress(label=3)
print(loops.Lop)
hs.Static(scale="large")
print(hs.Lop)
