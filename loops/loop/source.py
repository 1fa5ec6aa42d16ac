"""A source of batches that is no `tf.data` pipeline: any iterable, and what reads and sets its position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class GetsState(Protocol):
    """What Grain's iterators have."""

    def get_state(self) -> Any:
        """The position after the last batch that was given."""
        ...

    def set_state(self, state: Any) -> Any:
        """Goes to a position."""
        ...


@runtime_checkable
class HasStateDict(Protocol):
    """What torchdata's `StatefulDataLoader` and the iterable datasets of Hugging Face have."""

    def state_dict(self) -> Any:
        """The position after the last batch that was given."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """The next iterator begins at a position."""
        ...


class Source:
    """An iterable and its iterator.

    Args:
        batches: Any iterable. Its position is that of the iterable itself if it has one, else that of its iterator.

    Attributes:
        iterator: Gives the batches.
    """

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches
        self.iterator: Iterator[Any] = iter(batches)
        found = (one for one in (batches, self.iterator) if isinstance(one, (GetsState, HasStateDict)))
        self._holder: GetsState | HasStateDict | None = next(found, None)

    @property
    def name(self) -> str:
        """The class of what holds the position: the same for a loader and for an iterator made of it."""
        return type(self._batches if self._holder is None else self._holder).__qualname__

    @property
    def length(self) -> int | None:
        """How many batches it says that it has, or None if it does not say."""
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except Exception:  # Each library has its own way to say that there is no length.
            return None

    @property
    def has_state(self) -> bool:
        """Whether its position can be read and set."""
        return self._holder is not None

    def state(self) -> Any:
        """Its position; only with `has_state`."""
        return self._holder.get_state() if isinstance(self._holder, GetsState) else self._dicts.state_dict()

    def restore(self, state: Any) -> None:
        """Goes to a position; only with `has_state`. Raises what the source raises."""
        if isinstance(self._holder, GetsState):
            self._holder.set_state(state)
        else:
            self._dicts.load_state_dict(state)
        if self._holder is self._batches:
            self.iterator = iter(self._batches)

    @property
    def _dicts(self) -> HasStateDict:
        assert isinstance(self._holder, HasStateDict)
        return self._holder
