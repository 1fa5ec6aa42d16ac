"""The position in a source of batches: saved if the source has a state, else restored by skipping batches."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from loops.loop.fetching import Fetching
from loops.loop.out_of_data import why_empty
from loops.loop.source import Source
from loops.loop.state.source_state import decode
from loops.support.errors import CheckpointError, OutOfData
from loops.support.text import one_line


class SourcePosition:
    """An iterator over a source, and how its position is saved: the counterpart of `Position`.

    The position is that after the last batch that a step has taken, also where further ones have been fetched.

    Args:
        batches: Any iterable of batches. The first batch is taken from it.

    Attributes:
        problem: Why this position cannot be saved; None if it can, and before `probe`.

    Raises:
        OutOfData: If there is no batch.
    """

    dataset = None
    endless = False

    def __init__(self, batches: Iterable[Any]):
        self._source = Source(batches)
        self._fetching = Fetching(self._source)
        self.problem: str | None = None
        if self._fetching.element_spec is None:
            raise OutOfData(f"Loop: {why_empty('the source of batches')}")

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of the first batch."""
        return self._fetching.element_spec

    @property
    def batch_spec(self) -> Any:
        """What holds of every batch: its parts and their dtypes."""
        return tf.nest.map_structure(lambda spec: tf.TensorSpec(None, spec.dtype), self.element_spec)

    @property
    def iterator(self) -> Fetching:
        """What the loop takes batches from."""
        return self._fetching

    @property
    def ended(self) -> bool:
        """Whether a call that took too few steps met the end of the source."""
        return self._fetching.ended

    def check(self) -> None:
        """Waits for the next batch, and raises what the source raised in its place."""
        self._fetching.check()

    def heed(self, received: Sequence[int]) -> None:
        """Waits for no batch while there are signals in this list."""
        self._fetching.heed(received)

    def probe(self, folder: pathlib.Path) -> None:
        """Sets `problem`, and keeps the positions of all batches from now on if there is none.

        Raises:
            CheckpointError: If the position holds what a checkpoint does not.
        """
        self.problem = None
        if not self._source.has_state:
            self.problem = f"{self._source.name} has neither get_state and set_state nor state_dict and load_state_dict"
            return
        try:
            self._fetching.record()
        except CheckpointError:
            raise
        except Exception as error:  # Of any kind: it is the source's own.
            self.problem = f"{self._source.name} does not tell it ({type(error).__name__}: {one_line(error)})"

    def trackables(self) -> dict[str, Any]:
        """Nothing: the position is among the facts of a checkpoint, which are read before anything is restored."""
        return {}

    def described(self) -> dict[str, Any]:
        """The position as a fact of a checkpoint."""
        source = {
            "name": self._source.name,
            "length": self._source.length,
            "state": self._fetching.state,
            "shapes": self._fetching.shapes.described(),
        }
        return {"source": source}

    def go_to(self, path: str, data: Mapping[str, Any], restart: int | None = None) -> None:
        """Goes to the position of a checkpoint.

        Args:
            path: Of the checkpoint.
            data: What it says of the data.
            restart: The batches to pass over from the beginning, if its position is not to be restored.

        Raises:
            CheckpointError: If it is the position in something else.
        """
        if "source" not in data:
            raise CheckpointError(
                f"{path} was saved by a run over a tf.data.Dataset, and this one takes its batches from a "
                f"{self._source.name}. Use the dataset of that run, or choose another folder."
            )
        if restart is not None:
            self._skip(path, restart)
            return
        saved = data["source"]
        here = self.described()["source"]
        for what in ("name", "length"):
            if not self.problem and saved[what] != here[what]:
                raise CheckpointError(
                    f"{path} holds the position in another source of batches: its {what} was {saved[what]} and is "
                    f"{here[what]}. Use the source of that run, or choose another folder."
                )
        self._fetching.shapes.restore(saved["shapes"])
        if self.problem:
            self._skip(path, data["batches"])
            return
        if not data["batches"]:
            return  # No batch was taken, so that no position was kept.
        try:
            state = decode(saved["state"])
            self._fetching.restart(lambda: self._source.restore(state), saved["state"])
        except Exception as error:  # Of any kind: it is the source's own.
            raise CheckpointError(
                f"{path}: {self._source.name} cannot go on from the position that is saved in it "
                f"({type(error).__name__}: {one_line(error)}). Use the source of that run, or choose another folder."
            ) from error

    def skip_to(self, batches: int) -> None:
        """Does nothing: `go_to` has skipped them."""

    def _skip(self, path: str, batches: int) -> None:
        for done in range(batches):
            self._fetching.check()
            if not self._fetching.take(1):
                raise CheckpointError(
                    f"{path} was saved after {batches} batches, and this source of batches has {done}. Use the source "
                    "of that run, or choose another folder."
                )
            self._fetching.drop(1)

    @property
    def caveats(self) -> list[str]:
        """What a resumed run loses because of the source, one sentence per loss."""
        if not self.problem:
            return []
        return [
            f"the position in the source of batches cannot be saved: {self.problem}. A resumed run starts the source "
            "again and skips the batches that were taken. That takes their time again, and gives the same data only if "
            "the source gives the same batches each time it starts."
        ]

    @property
    def caveats_of_a_new_start(self) -> list[str]:
        """How the data of a run differs if it starts again from the beginning. Of a source that is unknown."""
        return []
