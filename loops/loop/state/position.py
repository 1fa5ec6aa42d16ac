"""The position in a run's data: saved if it can be, else restored by skipping batches."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from loops.backend import versions
from loops.backend.steps import is_deterministic
from loops.loop.failed_step import why_empty
from loops.loop.fetching import Fetching
from loops.loop.source import Source, decode
from loops.loop.state.operations import STATES, holds_state
from loops.loop.state.pipeline import Findings, look, surely_endless
from loops.support.errors import CheckpointError, OutOfData
from loops.support.text import one_line


class Position:
    """An iterator over a dataset, and how its position is saved.

    There is one iterator: each further one over the same dataset would shuffle differently.

    Attributes:
        dataset: The dataset.
        element_spec: The shapes and dtypes of its batches.
        batch_spec: The same: what holds of every batch.
        endless: Whether the dataset certainly never ends.
        problem: Why this position cannot be saved, with the operation's name and what to use instead; None if it can,
            and before `probe`.
        ended: Whether a call that took too few steps met the end of the dataset: nothing else makes it so.
    """

    ended = True

    def __init__(self, dataset: tf.data.Dataset):
        self.dataset, self.endless = dataset, surely_endless(dataset)
        self.element_spec = self.batch_spec = dataset.element_spec
        self._iterator: tf.data.Iterator | None = None
        self.problem: str | None = None

    @functools.cached_property
    def _findings(self) -> Findings:
        return look(self.dataset)

    @property
    def iterator(self) -> tf.data.Iterator:
        """The iterator that the loop takes batches from."""
        if self._iterator is None:
            self._iterator = iter(self.dataset)
        return self._iterator

    def probe(self) -> None:
        """Sets `problem`, by trying to save the position."""
        self.problem = refusal(self.iterator, self.dataset) or self._findings.problem

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
        self._iterator = iter(self.dataset.skip(batches))

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
    unseeded = findings.unseeded if skipping else findings.unseeded_again
    found = {
        _SHUFFLED: [name for name in unseeded if "shuffle" in name],
        _DRAWN: [name for name in unseeded if "shuffle" not in name],
        _UNORDERED: [] if is_deterministic(if_unknown=False) else findings.unordered,
        _IGNORED: findings.ignored,
        _UNKNOWN: findings.unknown,
        _UNSAID: findings.unsaid,
    }
    facts = {"when": "from now on" if skipping else "from the next epoch on", "versions": versions()}
    return [said.format(names=", ".join(sorted(names)), **facts) for said, names in found.items() if names]


_SHUFFLED = (
    "the dataset is shuffled without a seed: a resumed run shuffles differently, {when}. Use shuffle(..., seed=0), or "
    "set tf.random.set_seed before."
)
_DRAWN = (
    "the dataset draws random numbers without a seed ({names}): a resumed run draws others, {when}. Give random, "
    "sample_from_datasets or rejection_resample a seed=0, or set tf.random.set_seed before."
)
_UNORDERED = (
    "the dataset's {names} gives elements in the order in which they are ready (deterministic=False): two runs see "
    "them in different orders, resumed or not. Leave deterministic unset."
)
_IGNORED = (
    "the dataset's options ignore the state of {names} (external_state_policy): a resumed run starts it again. Use "
    "operations without state, such as tf.random.stateless_uniform."
)
_UNKNOWN = (
    "the dataset uses {names}, whose saved position has not been verified to be exact: a resumed run may see other "
    "data. Compare a resumed run with an uninterrupted one, or avoid it."
)
_UNSAID = (
    "{versions} hides parts of the dataset ({names}), so it is unknown whether a saved position is exact: a resumed "
    "run may see other data. Compare a resumed run with an uninterrupted one."
)


def serialized(iterator: tf.data.Iterator, dataset: tf.data.Dataset | None) -> tf.Tensor:
    """The position of an iterator over a dataset, with the same policy as `tf.train.Checkpoint`."""
    chosen = dataset.options().experimental_external_state_policy if dataset else None
    policy = chosen or tf.data.experimental.ExternalStatePolicy.FAIL
    return tf.raw_ops.SerializeIterator(resource_handle=handle_of(iterator), external_state_policy=policy.value)


def handle_of(iterator: tf.data.Iterator) -> tf.Tensor:
    """The resource of an iterator."""
    (handle,) = tf.nest.flatten(iterator, expand_composites=True)
    return handle


def refusal(iterator: tf.data.Iterator, dataset: tf.data.Dataset | None) -> str | None:
    """Why TensorFlow does not save a position, and what to use instead; None if it does."""
    try:
        serialized(iterator, dataset)
        return None
    except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
        message = error.message
    found = re.search(r"(\w+) is stateful", message)
    if not found:
        return " ".join(message.split())
    name = found[1]
    source = STATES.get(name) or ("a map with random numbers" if holds_state(name) else "a map with state")
    return (
        f"its operation {name} ({source}) has a state that TensorFlow does not save. Use operations without state, "
        "such as tf.random.stateless_uniform, to lose nothing"
    )


class SourcePosition:
    """An iterator over a source, and how its position is saved: the counterpart of `Position`.

    The position is that after the last batch that a step has taken, also where further ones have been fetched.

    Args:
        batches: Any iterable of batches. The first batch is taken from it.

    Attributes:
        element_spec: The shapes and dtypes of the first batch.
        batch_spec: What holds of every batch: its parts and their dtypes.
        iterator: What the loop takes batches from.
        check: Waits for the next batch, and raises what the source raised in its place.
        heed: Has no batch waited for while there are signals in a list.
        problem: Why this position cannot be saved; None if it can, and before `probe`.

    Raises:
        OutOfData: If there is no batch.
    """

    dataset = None
    endless = False

    def __init__(self, batches: Iterable[Any]):
        self._source = Source(batches)
        self.iterator = Fetching(self._source)
        self.problem: str | None = None
        if self.iterator.element_spec is None:
            raise OutOfData(f"Loop: {why_empty('the source of batches')}")
        self.element_spec = self.iterator.element_spec
        self.batch_spec = tf.nest.map_structure(lambda spec: tf.TensorSpec(None, spec.dtype), self.element_spec)
        self.check, self.heed = self.iterator.check, self.iterator.heed

    @property
    def ended(self) -> bool:
        """Whether a call that took too few steps met the end of the source."""
        return self.iterator.ended

    def probe(self) -> None:
        """Sets `problem`, and keeps the positions of all batches from now on if there is none.

        Raises:
            CheckpointError: If the position holds what a checkpoint does not.
        """
        self.problem = None
        if self._source.holder is None:
            self.problem = f"{self._source.name} has neither get_state and set_state nor state_dict and load_state_dict"
            return
        try:
            self.iterator.record()
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
            "state": self.iterator.state,
            "shapes": self.iterator.shapes.described(),
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
        self.iterator.shapes.restore(saved["shapes"])
        if self.problem:
            self._skip(path, data["batches"])
            return
        if not data["batches"]:
            return  # No batch was taken, so that no position was kept.
        try:
            state = decode(saved["state"])
            self.iterator.restart(lambda: self._source.restore(state), saved["state"])
        except Exception as error:  # Of any kind: it is the source's own.
            raise CheckpointError(
                f"{path}: {self._source.name} cannot go on from the position that is saved in it "
                f"({type(error).__name__}: {one_line(error)}). Use the source of that run, or choose another folder."
            ) from error

    def skip_to(self, batches: int) -> None:
        """Does nothing: `go_to` has skipped them."""

    def _skip(self, path: str, batches: int) -> None:
        for done in range(batches):
            self.iterator.check()
            if not self.iterator.take(1):
                raise CheckpointError(
                    f"{path} was saved after {batches} batches, and this source of batches has {done}. Use the source "
                    "of that run, or choose another folder."
                )
            self.iterator.drop(1)

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
