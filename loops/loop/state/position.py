"""A dataset's position: saved if TensorFlow can save it, else restored by skipping batches."""

from __future__ import annotations

import functools
import pathlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from loops.backend.steps import is_deterministic
from loops.backend.versions import versions
from loops.loop.state.operations import STATES, holds_state
from loops.loop.state.pipeline import Findings, look, surely_endless
from loops.loop.state.source_position import SourcePosition
from loops.support.errors import CheckpointError


class Position:
    """An iterator over a dataset, and how its position is saved.

    There is one iterator: each further one over the same dataset would shuffle differently.

    Attributes:
        problem: Why this position cannot be saved, with the operation's name and what to use instead; None if it can,
            and before `probe`.
        ended: Whether a call that took too few steps met the end of the dataset: nothing else makes it so.
    """

    ended = True

    def __init__(self, dataset: tf.data.Dataset):
        self._dataset = dataset
        self._iterator: tf.data.Iterator | None = None
        self.problem: str | None = None

    @property
    def dataset(self) -> tf.data.Dataset:
        """The dataset."""
        return self._dataset

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of its batches."""
        return self._dataset.element_spec

    @property
    def batch_spec(self) -> Any:
        """What holds of every batch."""
        return self.element_spec

    @functools.cached_property
    def _findings(self) -> Findings:
        return look(self._dataset)

    @property
    def iterator(self) -> tf.data.Iterator:
        """The iterator that the loop takes batches from."""
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return self._iterator

    @property
    def endless(self) -> bool:
        """Whether the dataset certainly never ends."""
        return surely_endless(self._dataset)

    def probe(self, folder: pathlib.Path) -> None:
        """Sets `problem`, by trying to save the position.

        Raises:
            OSError, tf.errors.OpError: If the folder cannot be written.
        """
        self.problem = self._findings.problem
        with tempfile.TemporaryDirectory(prefix="probe-", dir=folder) as place:
            try:
                tf.train.Checkpoint(iterator=self.iterator).write(str(pathlib.Path(place) / "position"))
            except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
                self.problem = refusal(error)

    def check(self) -> None:
        """Does nothing: what the dataset raises, the step raises."""

    def heed(self, received: Sequence[int]) -> None:
        """Does nothing: TensorFlow waits for its batches whatever signals there are."""

    def trackables(self) -> dict[str, Any]:
        """What a checkpoint saves and restores of it, by name."""
        return {} if self.problem else {"position": self.iterator}

    def described(self) -> dict[str, Any]:
        """What the facts of a checkpoint say of it beyond `problem` and `caveats`."""
        return {}

    def go_to(self, path: str, data: Mapping[str, Any], restart: int | None = None) -> None:
        """Before a checkpoint is restored: makes sure that it is of a dataset.

        Args:
            path: Of the checkpoint.
            data: What it says of the data.
            restart: The batches to pass over from the beginning, if its position is not to be restored.

        Raises:
            CheckpointError: If it is of a source of batches, or has fewer batches.
        """
        if "source" in data:
            raise CheckpointError(
                f"{path} was saved by a run that took its batches from a {data['source']['name']}, and this one takes "
                "them from a tf.data.Dataset. Use the source of that run, or choose another folder."
            )
        # One that cannot be saved is skipped in anyway.
        for done in range(0 if self.problem else restart or 0):
            if next(self.iterator, None) is None:
                raise CheckpointError(
                    f"{path} was saved after {restart} batches of this size, and this dataset has {done}. Use the data "
                    "of that run, or choose another folder."
                )

    def skip_to(self, batches: int) -> None:
        """Starts the dataset again and skips the batches that were taken."""
        self._iterator = iter(self._dataset.skip(batches))

    @property
    def caveats(self) -> list[str]:
        """What a resumed run loses because of the dataset, one sentence per loss."""
        found = []
        if self.problem:
            found.append(
                f"the position in the dataset cannot be saved: {self.problem}. A resumed run starts the dataset "
                "again and skips the batches that were taken. That takes their time again, and gives the same "
                "data only if the pipeline gives the same batches each time it starts; random numbers in it may differ."
            )
        found += unlike(self._findings, skipping=bool(self.problem))
        return found

    @property
    def caveats_of_a_new_start(self) -> list[str]:
        """How the data of a run differs if it starts again from the beginning, one sentence per difference."""
        return unlike(self._findings, skipping=True)


def position_in(data: tf.data.Dataset | Iterable[Any]) -> Position | SourcePosition:
    """The position at the start of a dataset, or of any other iterable of batches."""
    return Position(data) if isinstance(data, tf.data.Dataset) else SourcePosition(data)


def unlike(findings: Findings, *, skipping: bool) -> list[str]:
    """How the data of a resumed run differs, one sentence per difference.

    Args:
        findings: From `pipeline.look`.
        skipping: Whether the dataset starts again and skips batches, in place of a restored position.
    """
    found = []
    unseeded = findings.unseeded if skipping else findings.unseeded_again
    shuffled = [name for name in unseeded if "shuffle" in name]
    drawn = [name for name in unseeded if "shuffle" not in name]
    when = "from now on" if skipping else "from the next epoch on"
    if shuffled:
        found.append(
            f"the dataset is shuffled without a seed: a resumed run shuffles differently, {when}. Use "
            "shuffle(..., seed=0), or set tf.random.set_seed before."
        )
    if drawn:
        found.append(
            f"the dataset draws random numbers without a seed ({', '.join(drawn)}): a resumed run draws others, {when}."
            " Give random, sample_from_datasets or rejection_resample a seed=0, or set tf.random.set_seed before."
        )
    if findings.unordered and not is_deterministic(if_unknown=False):
        found.append(
            f"the dataset's {', '.join(findings.unordered)} gives elements in the order in which they are ready "
            "(deterministic=False): two runs see them in different orders, resumed or not. Leave deterministic unset."
        )
    if findings.ignored:
        found.append(
            f"the dataset's options ignore the state of {', '.join(findings.ignored)} (external_state_policy): a "
            "resumed run starts it again. Use operations without state, such as tf.random.stateless_uniform."
        )
    if findings.unknown:
        found.append(
            f"the dataset uses {', '.join(findings.unknown)}, whose saved position has not been verified to "
            "be exact: a resumed run may see other data. Compare a resumed run with an uninterrupted one, or avoid it."
        )
    if findings.unsaid:
        found.append(
            f"{versions()} hides parts of the dataset ({', '.join(findings.unsaid)}), so it is unknown whether a saved "
            "position is exact: a resumed run may see other data. Compare a resumed run with an uninterrupted one."
        )
    return found


def refusal(error: tf.errors.OpError) -> str:
    """Why TensorFlow did not save a position, and what to use instead."""
    found = re.search(r"(\w+) is stateful", error.message)
    if not found:
        return " ".join(error.message.split())
    name = found[1]
    source = STATES.get(name) or ("a map with random numbers" if holds_state(name) else "a map with state")
    return (
        f"its operation {name} ({source}) has a state that TensorFlow does not save. Use operations without state, "
        "such as tf.random.stateless_uniform, to lose nothing"
    )
