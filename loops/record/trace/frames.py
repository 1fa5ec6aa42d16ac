"""The flight recorder: which steps' histograms to write, and which to keep in memory until a skip."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loops.support.errors import LoopError

MOST = 2**28
"""The most bytes of the histograms that a checkpoint holds: a hundred steps of a thousand tensors take a third."""
AFTER = 4
"""The number of steps after a skip whose histograms are also written."""


class Frame(NamedTuple):
    """The histograms of one step as a sparse array, with one entry for each nonzero count.

    Attributes:
        step: The number of the step.
        tensor: Int64 [entries], the index of the tensor among those measured.
        bin: Int64 [entries], see `scaler.observe`.
        counts: Int64 [entries].
    """

    step: int
    tensor: np.ndarray
    bin: np.ndarray
    counts: np.ndarray


def frame_of(step: int, counts: np.ndarray) -> Frame:
    """A frame from counts [tensors, bins]."""
    tensor, place = np.nonzero(counts)
    return Frame(step, tensor, place, counts[tensor, place].astype(np.int64))


def choose(steps: np.ndarray, skips: Sequence[int], newest: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Chooses to write the steps around skips, and to keep the last ones of the rest.

    Args:
        steps: Int [steps], those with histograms that are not yet written, in order.
        skips: The known skipped steps, in order.
        newest: The last step of the run so far.
        window: The number of steps before a skip to write.

    Returns:
        Two masks, bool [steps]: those to write, and those of the others to keep in memory.
    """
    known = np.asarray(skips, np.int64)
    following = np.searchsorted(known, steps)
    far = np.iinfo(np.int64).max // 2
    until = np.append(known, far)[following] - steps
    since = steps - np.append(-far, known)[np.searchsorted(known, steps, side="right")]
    write = (until <= window) | (since <= AFTER)
    if window == 0:
        write = np.zeros_like(write)
    return write, ~write & (steps > newest - window)


def pack(frames: Sequence[Frame]) -> str:
    """Frames as text, for a checkpoint."""
    columns = [np.stack([np.full_like(one.bin, one.step), one.tensor, one.bin, one.counts]) for one in frames]
    table = np.concatenate([np.zeros([4, 0], np.int64), *columns], axis=1).astype("<i8")
    return base64.b64encode(zlib.compress(table.tobytes(), 1)).decode("ascii")


def unpack(text: str) -> list[Frame]:
    """The inverse of `pack`.

    Raises:
        LoopError: If the text is none that `pack` made, or is one of more than `MOST` bytes.
    """
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text, validate=True), MOST)
        if not unpacking.eof:
            raise ValueError("it is cut off, or too large")
        table = np.frombuffer(data, "<i8").astype(np.int64).reshape(4, -1)
    except (TypeError, ValueError, zlib.error) as error:
        raise LoopError(f"the histograms that a checkpoint holds for a trace cannot be read: {error}.") from error
    return [Frame(int(step), *table[1:, table[0] == step]) for step in np.unique(table[0])]
