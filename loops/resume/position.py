"""A dataset's position: saved where TensorFlow can, else found again by skipping."""

from __future__ import annotations

import pathlib
import re
import tempfile

import tensorflow as tf

from loops.resume.shuffles import forgotten_shuffle, has_unseeded_shuffle

_SOURCES = {
    "PyFunc": "from_generator or numpy_function",
    "EagerPyFunc": "py_function",
    "ReadVariableOp": "a map that reads a variable",
    "RngReadAndSkip": "a map that draws from a tf.random.Generator",
}
_RANDOM = re.compile("Random|Normal|Multinomial|Uniform")


class Position:
    """An iterator over a dataset, and how its position survives.

    A dataset is iterated once: each further iterator over the same object shuffles differently.

    Attributes:
        problem: Why this position cannot be saved, with the operation's name and what to use instead; None where it
            can, as far as `probe` was asked.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self._dataset = dataset
        self._iterator: tf.data.Iterator | None = None
        self.problem: str | None = None

    @property
    def iterator(self) -> tf.data.Iterator:
        """What the loop takes batches from."""
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return self._iterator

    def probe(self, folder: pathlib.Path) -> None:
        """Finds out whether the position can be saved, by saving it.

        Raises:
            OSError, tf.errors.OpError: If the folder cannot be written.
        """
        between = forgotten_shuffle(self._dataset)
        if between:
            self.problem = (
                f"with {between} between shuffle and repeat, TensorFlow forgets how later epochs are shuffled. Repeat "
                "right after the shuffle, .shuffle(n, seed=0).repeat().batch(...), to lose nothing"
            )
        with tempfile.TemporaryDirectory(prefix="probe-", dir=folder) as place:
            try:
                tf.train.Checkpoint(iterator=self.iterator).write(str(pathlib.Path(place) / "position"))
            except tf.errors.FailedPreconditionError as error:
                self.problem = _stateful(error)

    def skip_to(self, batches: int) -> None:
        """Starts anew and passes over the batches that were taken."""
        self._iterator = iter(self._dataset.skip(batches))

    @property
    def caveats(self) -> list[str]:
        """What a resumed run loses because of the dataset, sentences about one loss each."""
        found = []
        if self.problem:
            found.append(
                f"the position in the dataset cannot be saved: {self.problem}. A resumed run starts the dataset "
                "anew and skips the batches that were taken. That takes their time again, and gives the same "
                "data only if the pipeline gives the same batches each time it starts; random numbers in it may differ."
            )
        if has_unseeded_shuffle(self._dataset):
            found.append(
                "the dataset is shuffled without a seed: a resumed run shuffles differently, from now on if batches "
                "are skipped, else from the next epoch on. Use shuffle(..., seed=0), or set tf.random.set_seed before."
            )
        return found


def _stateful(error: tf.errors.FailedPreconditionError) -> str:
    found = re.search(r"(\w+) is stateful", error.message)
    if not found:
        return error.message
    name = found[1]
    source = _SOURCES.get(name) or ("a map with random numbers" if _RANDOM.search(name) else "a map with state")
    return (
        f"its operation {name} ({source}) has a state that TensorFlow does not save. Use operations without state, "
        "such as tf.random.stateless_uniform, to lose nothing"
    )
