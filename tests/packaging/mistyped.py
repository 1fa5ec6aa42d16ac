"""Three mistakes that a type checker finds where it sees the types of both packages."""

import loops
import scaler

scaler.Dynamic(initial_scale="large")
loops.Progress(label=3)
print(loops.Lop)
