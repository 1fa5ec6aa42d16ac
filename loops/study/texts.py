"""The captions of a study's report."""

from markupsafe import Markup

TABLE = Markup("""<b>Accuracy</b> is on held-out examples. <b>Skipped</b> counts the steps that were not applied because
the gradients were not finite. <b>Flushed</b> is the share of gradient values, not zero in float32, that float16 makes
zero at the loss scale in use. <b>vs float32</b> is the difference in accuracy, in percentage points.""")
COMPARISON = Markup("""A dot is the mean over the seeds, with a line from the lowest to the highest; the grey line is
float32. Shares are on a logarithmic axis. Below are the loss scales of all 16-bit set-ups, where one of them moves.""")
COSTS = Markup("""Time is the median over the calls of a run but the first, in which the step is traced, with a line
from the lower to the upper quartile. The set-ups ran one after the other, so differences smaller than these lines mean
nothing. Operations were deterministic, which costs time. Memory is counted: weights, masters, slots of the
optimizer, gradients, and what the forward pass keeps for the backward pass. Energy is what the
machine's processors (RAPL) and GPUs (NVML, nvidia-smi) report for the same time, for everything that ran on it; a dash
means unknown.""")
LOSS = Markup("""A panel is one set-up, with the range of float32 in grey where float32 was run: a set-up that trains as
float32 does keeps to the grey. The curves are moving means over a few steps, on a logarithmic axis.""")
SEEDS = Markup("""The line is the mean over the seeds, the band reaches from the lowest seed to the highest; a bump in
one seed alone is variation from seed to seed.""")
LOSS_SCALE = Markup("""A line is one run: the widest and palest is seed 0, and each further seed lies on it
thinner and stronger. A dynamic scale grows after a number of steps with finite gradients and backs off at one without:
that step is skipped (×) and leaves the weights as they were. A skipped step now and then is how the largest usable
scale is found; many in a row would mean that something else overflows.""")
GRADIENTS = Markup("""A line is one set-up: its gradients of activations, and those of weights. Values are counted by
size, on one fixed batch at regular intervals of the run, in a float32 copy of the model, because float16 cannot show
what it loses; zeros are left out, and the outermost bins hold all values beyond. In float16, values on the left
become zero, subnormal values keep fewer bits the smaller they are, and values on the right become infinite.
Scaling the loss moves the whole histogram to the right, by log<sub>2</sub> of the scale; the gradients of activations
are what backpropagation hands from layer to layer, and those of weights are computed from them.""")
SMALL = Markup("""Here the loss is multiplied by {}, as a term with a small weight would be, and Adam’s epsilon with it,
so that without rounding nothing would change. The gradients shrink by that factor, towards what float16 makes zero; a
loss scale moves them back before they are rounded.""")
NO_MASTERS = Markup("""<b>What can happen without masters</b> (an explanation, measured on the digits, not in these
runs): after the first step, 18% of Adam’s second moments are 0 in float16 while the first moment is not. Only epsilon
is left to divide by, so with a learning rate of 0.01 those weights jump by 6.5 (median) and up to 14.5, where the
others move by 0.01.""")
FAILED = Markup("""These runs ended with an error. No mean includes their numbers; the figures show them up to the
failure. “vs float32” and the first sentence are about those that finished.""")
