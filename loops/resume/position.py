"""A dataset's position: saved where TensorFlow can, else found again by skipping."""

from __future__ import annotations

import pathlib
import re
import tempfile

import tensorflow as tf

_SOURCES = {
    "PyFunc": "from_generator or numpy_function",
    "EagerPyFunc": "py_function",
    "ReadVariableOp": "a map that reads a variable",
    "RngReadAndSkip": "a map that draws from a tf.random.Generator",
}
_RANDOM = re.compile("Random|Normal|Multinomial|Uniform")


class Position:
    """An iterator over a dataset, and how its position survives.

    Attributes:
        iterator: What the loop takes batches from.
        problem: Why TensorFlow cannot save this position, with the operation's name; None where it can.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self._dataset = dataset
        self.iterator = iter(dataset)
        self.problem: str | None = None

    def probe(self, folder: pathlib.Path) -> None:
        """Finds out whether the position can be saved, by saving it.

        Raises:
            OSError, tf.errors.OpError: If the folder cannot be written.
        """
        with tempfile.TemporaryDirectory(prefix="probe-", dir=folder) as place:
            try:
                tf.train.Checkpoint(iterator=self.iterator).write(str(pathlib.Path(place) / "position"))
            except tf.errors.FailedPreconditionError as error:
                self.problem = _why(error)

    def skip_to(self, batches: int) -> None:
        """Starts anew and passes over the batches that were taken."""
        self.iterator = iter(self._dataset.skip(batches))

    @property
    def caveat(self) -> str | None:
        """What a resumed run loses because of the dataset, as sentences; None if it loses nothing."""
        if self.problem:
            return (
                f"the position in the dataset cannot be saved: {self.problem}. A resumed run starts the dataset anew and "
                "skips the batches that were taken. That takes their time again, and gives the same data only if the "
                "pipeline gives the same batches each time it starts; random numbers drawn in it may differ. Use "
                "operations without state, such as tf.random.stateless_uniform, to lose nothing."
            )
        if _has_unseeded_shuffle(self._dataset):
            return (
                "the dataset is shuffled without a seed: a resumed run ends this epoch in the same order, but the "
                "following ones are shuffled differently. Use shuffle(..., seed=0), or set tf.random.set_seed before."
            )
        return None


def _why(error: tf.errors.FailedPreconditionError) -> str:
    found = re.search(r"(\w+) is stateful", error.message)
    if not found:
        return error.message
    name = found[1]
    source = _SOURCES.get(name) or ("a map with random numbers" if _RANDOM.search(name) else "a map with state")
    return f"its operation {name} ({source}) has a state that TensorFlow does not save"


def _has_unseeded_shuffle(dataset) -> bool:
    # TensorFlow has no public way to walk a pipeline; what is inside of interleaved datasets is not seen.
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if "Shuffle" in type(dataset).__name__ and getattr(dataset, "_reshuffle_each_iteration", True):
        constants = [tf.get_static_value(seed) for seed in seeds if seed is not None]
        if constants and all(value is not None and int(value) == 0 for value in constants):
            return True
    return any(_has_unseeded_shuffle(part) for part in getattr(dataset, "_inputs", lambda: [])())
