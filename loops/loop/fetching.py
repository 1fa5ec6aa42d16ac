"""Batches of a source that is no `tf.data` pipeline, fetched ahead of the steps, each with the position after it."""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loops.loop.source import Source, arrays_of, check_alike, encode, shapes_of, size_of, spec_of, tensors_of

MOST_BYTES = 2**27
"""The most bytes of batches that are stacked at once, and that are fetched ahead beside them, unless one has more."""
_MANY = 3
"""Shapes of batches from which on a step is traced for any."""
_PATIENCE = 0.1
"""Seconds between two looks at signals while a batch is awaited."""
_END = object()


class Fetched(NamedTuple):
    """A batch that no step has taken.

    Attributes:
        batch: From `arrays_of`.
        state: The position after it, from `encode`; None if it is not recorded.
        shapes: Of its arrays.
        size: In bytes.
    """

    batch: Any
    state: Any
    shapes: tuple
    size: int


class Shapes:
    """The shapes that the batches of a source had so far, and what they have in common once they are many.

    A step is traced for each shape, which takes longer than many steps. So from the third shape on it is traced for any
    length, along the sides that differ.

    Attributes:
        common: For each array of a batch its shape, None where it differs; None before the third shape.
    """

    def __init__(self) -> None:
        self._seen: list[Sequence[Sequence[int]]] = []
        self.common: Sequence[Sequence[int | None] | None] | None = None

    def meet(self, batch: Any) -> None:
        """Notes the shapes of the next batch."""
        shapes = [list(shape) for shape in shapes_of(batch)]
        if self.common is not None:
            self.common = list(map(_common, self.common, shapes))
        elif shapes not in self._seen:
            self._seen.append(shapes)
            if len(self._seen) == _MANY:
                self.common = [functools.reduce(_common, each) for each in zip(*self._seen, strict=True)]

    def described(self) -> dict[str, Any]:
        """The shapes as a fact of a checkpoint: a run that goes on is traced as it would have been."""
        return {"seen": self._seen, "common": self.common}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Takes what `described` returned."""
        self._seen, self.common = list(facts["seen"]), facts["common"]


def _common(one: Sequence[int | None] | None, other: Sequence[int | None] | None) -> Sequence[int | None] | None:
    """What two shapes have in common; None if not even the number of their sides."""
    if one is None or other is None or len(one) != len(other):
        return None
    return [side if side == beside else None for side, beside in zip(one, other, strict=True)]


class Fetching(Iterator[Any]):
    """The batches of a source, of which the next ones are fetched by a thread.

    The first one is fetched at once, to know what batches are. The thread starts when the second may be needed. It ends
    with the source, with an error, and with this object. What the source raises is raised where its batch would be.

    Args:
        source: Its batches are taken here alone.

    Attributes:
        element_spec: The shapes and dtypes of the first batch, or None if there is none.
        state: The position after the last batch that was dropped, from `encode`; None if it is not recorded.
        shapes: Those of the batches that were taken.
    """

    def __init__(self, source: Source):
        self._ahead = _Ahead(source)
        self._ahead.fetch()
        if self._ahead.error is not None:
            raise self._ahead.error
        self.element_spec = self._ahead.spec
        self.state: Any = None
        self.shapes = Shapes()
        self._received: Sequence[int] = ()
        weakref.finalize(self, self._ahead.stop)

    def heed(self, received: Sequence[int]) -> None:
        """Waits for no batch while signals have been received: a list that somebody else fills."""
        self._received = received

    def record(self) -> None:
        """Keeps the position after each batch from now on. Raises what reading it raises."""
        self._ahead.record()

    def restart(self, restore: Callable[[], None], state: Any) -> None:
        """Forgets what was fetched, and goes on from another position.

        Args:
            restore: Moves the source.
            state: That position, from `encode`.
        """
        self._ahead.restart(restore)
        self.state = state

    @property
    def ended(self) -> bool:
        """Whether the source has no further batch."""
        return self._ahead.ended and not self._ahead.ready

    def check(self) -> None:
        """Waits for the next batch, and raises what the source raised in its place."""
        ahead = self._ahead
        with ahead.changed:
            self._wait(lambda: bool(ahead.ready))
            if not ahead.ready and ahead.error is not None:
                error, ahead.error = ahead.error, None
                raise error

    def take(self, limit: int) -> list[Any]:
        """The next batches, as arrays, which stay the next ones until they are dropped.

        Args:
            limit: The most batches.

        Returns:
            Batches of one shape. Fewer than `limit` before a batch of another shape, where they would be too large
            together, at the end, before an error, and after a signal.
        """
        ahead = self._ahead
        with ahead.changed:
            ahead.wanted = limit
            ahead.changed.notify_all()
            self._wait(lambda: ahead.has(limit))
            found: list[Any] = []
            size = 0
            for one in ahead.ready:
                size += one.size
                if len(found) == limit or (found and (one.shapes != ahead.ready[0].shapes or size > MOST_BYTES)):
                    break
                found.append(one.batch)
            ahead.in_use = len(found)
            ahead.changed.notify_all()  # Room for those of the next call, while this one computes.
            return found

    def drop(self, count: int) -> None:
        """Passes over batches: the position is then after them."""
        ahead = self._ahead
        with ahead.changed:
            for _ in range(count):
                one = ahead.ready.popleft()
                ahead.size -= one.size
                self.state = one.state
            ahead.in_use = 0
            ahead.changed.notify_all()

    def __next__(self) -> Any:
        """The next batch as tensors, which is dropped."""
        self.check()
        batches = self.take(1)
        if not batches:
            raise StopIteration
        self.drop(1)
        return tensors_of(batches[0])

    def _wait(self, enough: Callable[[], bool]) -> None:
        ahead = self._ahead
        while not (enough() or ahead.done or self._received):
            ahead.start()
            ahead.changed.wait(_PATIENCE)


class _Ahead:
    """What the loop shares with the thread, which must not hold the `Fetching`: it ends with that."""

    def __init__(self, source: Source):
        self.source = source
        self.changed = threading.Condition()
        self.ready: collections.deque[Fetched] = collections.deque()
        self.spec: Any = None
        self.size, self.wanted, self.in_use = 0, 1, 0
        self.error: BaseException | None = None
        self.ended = self.recording = self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more comes after what is ready."""
        return self.ended or self.error is not None

    def has(self, limit: int) -> bool:
        """Whether as many batches are ready as one call can take."""
        ready = self.ready
        return len(ready) >= limit or self.size > MOST_BYTES or (bool(ready) and ready[-1].shapes != ready[0].shapes)

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="halfstep-batches", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread. A source that does not answer is left: the thread ends with its next batch."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        # The garbage collector may call this in the thread itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def record(self) -> None:
        """Keeps the positions from now on, beginning with that after the batch that was fetched last."""
        self._pause()
        state = encode(self.source.state())
        if self.ready:
            self.ready[-1] = self.ready[-1]._replace(state=state)
        self.recording = True

    def restart(self, restore: Callable[[], None]) -> None:
        """Moves the source, and forgets what was fetched."""
        self._pause()
        restore()
        self.ready.clear()
        self.size, self.in_use, self.error, self.ended = 0, 0, None, False

    def fetch(self) -> None:
        """Adds the next batch to those that are ready, or notes what came in its place."""
        fetched, error, ended = None, None, False
        try:
            batch = next(self.source.iterator, _END)
            ended = batch is _END
            fetched = None if ended else self._of(batch)
        except BaseException as raised:  # Of any kind: it belongs to the step that would have had the batch.
            error = raised
        with self.changed:
            if fetched is not None:
                self.ready.append(fetched)
                self.size += fetched.size
            self.error, self.ended = error, ended
            self.changed.notify_all()

    def _of(self, batch: Any) -> Fetched:
        batch = arrays_of(batch)
        if self.spec is None:
            self.spec = spec_of(batch)
        check_alike(batch, self.spec)
        state = encode(self.source.state()) if self.recording else None
        return Fetched(batch, state, shapes_of(batch), size_of(batch))

    def _run(self) -> None:
        while True:
            with self.changed:
                while self._is_full() and not self._stopping:
                    self.changed.wait()
                if self._stopping or self.done:
                    return
            self.fetch()

    def _is_full(self) -> bool:
        """Whether the next call has its batches beside those of this one."""
        enough = self.in_use + max(self.wanted, 2)
        return len(self.ready) >= enough or (len(self.ready) >= 2 and self.size > 2 * MOST_BYTES)

    def _pause(self) -> None:
        """Waits for the thread, which takes batches from the source until it ends."""
        while self._thread is not None and self._thread.is_alive():
            self.stop()
        self._stopping = False
