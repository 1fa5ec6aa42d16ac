"""Operations on a list of gradients, as `tape.gradient` returns it: tensors, `tf.IndexedSlices` and None."""

from scaler.gradients.clipping import ClipByNorm, ClipByValue
from scaler.gradients.lists import Gradient as Gradient
from scaler.gradients.lists import add as add
from scaler.gradients.lists import all_finite, derivatives, largest, overwrites, unscale
from scaler.gradients.lists import divide as divide
from scaler.gradients.lists import is_one as is_one
from scaler.gradients.lists import joined as joined
from scaler.gradients.lists import limit as limit
from scaler.gradients.lists import matching as matching
from scaler.gradients.lists import multiply as multiply
from scaler.gradients.lists import not_finite as not_finite
from scaler.gradients.lists import opaque as opaque
from scaler.gradients.lists import squared_norm as squared_norm
from scaler.gradients.lists import sum_duplicates as sum_duplicates
from scaler.gradients.lists import values_of as values_of
from scaler.gradients.lists import widened as widened
from scaler.gradients.statistics import amax, histogram

__all__ = [
    "ClipByNorm",
    "ClipByValue",
    "all_finite",
    "amax",
    "derivatives",
    "histogram",
    "largest",
    "overwrites",
    "unscale",
]
