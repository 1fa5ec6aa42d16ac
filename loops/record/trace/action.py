"""Records each step of a run in a file that pandas and Arrow can read.

The flight recorder chooses which steps' histograms to write, and which to keep in memory until a skip.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loops.loop.visit import Cadence, Seconds, Visit
from loops.record.trace.file import TraceFile
from loops.record.trace.stream import UNMEASURED, Described, Frame, arrow, batch_of, opening, schema_of
from loops.record.trace.tensors import Tensor, lacks_of, tensors_of
from loops.record.trace.visit_columns import Seen, columns_of, gauge_values, gauges_of, seen_in, skip_names, skipped
from loops.step.parts import parts_in
from loops.step.probing import watched_by
from loops.support.errors import LoopError, ResumeWarning, TraceWarning, check_count
from loops.support.written import Place, as_path, writing

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class Trace:
    """Records each step, and the histograms from the step's probes, as an Arrow stream.

        loop = loops.Loop(step, dataset, steps_per_call=100, actions=[loops.Trace("run/trace.arrow")])
        loops.observe.read("run/trace.arrow").steps.to_pandas()

    For each step it records loss, loss scale, whether it was attempted and applied, the cause of a skip, and norms; if
    the train step has probes also the largest magnitude of each tensor, the headroom and the critical scale, and what
    ready probes measured, see docs/trace.md. Histograms are written at a cadence, and by a flight recorder, which holds
    those of the last steps in memory and writes them when a step is skipped, with a few after it, and when the run
    ends.

    A visit is written in one piece with a checksum, before a checkpoint is saved. An existing file is replaced or
    continued, as by `JsonLines`.

    Args:
        path: The file. Missing folders are created. Commands that are given the run's folder look for "trace.arrow" in
            it, and have to be given a file of another name.
        every: Write the histograms of the steps that are multiples of this number; with `Seconds`, of the last step of
            each visit that is due.
        window: The number of steps whose histograms the flight recorder holds; 0 for none.

    Raises:
        LoopError: Without pyarrow; when the run begins, if the file that it continues has other tensors.
        NotWritable: When the run begins, if the file cannot be written.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(self, path: str | os.PathLike, *, every: int | Seconds = 100, window: int = 16):
        self._file = TraceFile(as_path("Trace", "path", path))
        self.writes = Place(self._file.path, "file")
        self._cadence = Cadence("Trace", every)
        check_count(f"Trace(window={window!r})", window, 0)
        arrow()
        self._window = int(window)
        self._train_step: Any = None
        self._replicas = 1
        self._schema: Any = None
        self._what = Described([])
        self._last_skip = 0
        self._held: list[Frame] = []
        self._before_end: dict | None = None

    def begin(self, loop: Loop) -> None:
        """Before the first step: remembers the loop's train step."""
        self._train_step, self._replicas = loop.train_step, getattr(loop, "replicas", 1)

    def save_state(self) -> dict:
        """The length of the file after the last visit, and what the flight recorder held, for a `Checkpoint`."""
        # The state before `end`: what `end` adds, a longer run would not have there.
        return self._before_end or {
            "end": self._file.end,
            "last_skip": self._last_skip,
            "held": pack(self._held),
        }

    def load_state(self, value: dict) -> None:
        """Makes the next run continue from what `save_state` returned."""
        self._held, self._last_skip = unpack(value["held"]), value["last_skip"]
        self._schema = None
        self._file.keep(value["end"])

    def load_no_state(self, step: int) -> None:
        """Has the next run go on after a step whose checkpoint knows nothing of the file, and warns of that.

        The run was saved without this action, or with another path.
        """
        self._schema = None
        found = self._file.keep_steps(step)
        steps = f"the steps up to {found} are kept" if found else "it has no step before"
        warnings.warn(
            f"{self._file.path}: the checkpoint of step {step} was saved without it: {steps}, and the trace goes on "
            f"with step {step + 1}.",
            ResumeWarning,
            stacklevel=2,
        )

    def __enter__(self) -> Trace:
        with writing("Trace", self._file.path):
            self._file.open()
        if self._file.end:
            self._check_tensors()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __call__(self, visit: Visit) -> None:
        """Writes the steps of a visit."""
        if self._file.closed:
            raise RuntimeError("Trace is written by Loop.run; outside of it, use it in a with statement.")
        self._begin_stream(visit.vectors)
        self._before_end = None
        seen = seen_in(visit, self._train_step) if self._what.tensors else None
        frames, held, last_skip = self._frames(visit, seen)
        self._file.add(
            batch_of(
                self._schema,
                visit.first,
                columns_of(visit, self._what.tensors, self._train_step, seen),
                skip_names(visit, self._train_step).get("cause", [None] * (visit.counters.data - visit.first + 1)),
                _rows(np.where(seen.known, seen.amax, UNMEASURED), seen.rows) if seen else None,
                frames,
                self._gauge_rows(visit),
            )
        )
        self._held, self._last_skip = held, last_skip

    def end(self) -> None:
        """After the last step: writes what the flight recorder holds."""
        # Without a schema, this run has written nothing: it failed before.
        if self._held and self._schema is not None and not self._file.closed:
            self._before_end = self.save_state()
            held, self._held = self._held, []
            try:
                self._file.add(batch_of(self._schema, 0, {}, [], None, held, [] if self._what.gauges else None))
            except OSError as error:
                # A failure here must not keep the other actions from ending, such as from a save.
                warnings.warn(
                    f"{self._file.path}: the last histograms could not be written ({error.strerror or error}).",
                    TraceWarning,
                    stacklevel=2,
                )

    def _check_tensors(self) -> None:
        """Makes sure that the file to continue has the tensors that this run measures.

        The file was written after a trace of the step, so the tensors are known before the next step.
        """
        found, now = self._file.read().what, self._described()
        tensors = found and found.tensors
        if tensors != now.tensors:
            self._file.close()
            raise LoopError(
                f"{self._file.path}: it is a trace of {_names(tensors)}, but this run measures {_names(now.tensors)}. "
                + (_COUNTED if _without_counts(tensors) == _without_counts(now.tensors) else "Choose another file.")
            )
        if found and found.gauges != now.gauges:
            self._file.close()
            raise LoopError(
                f"{self._file.path}: its ready probes are {', '.join(found.gauges) or 'none'}, but those of this run "
                f"{', '.join(now.gauges) or 'none'}. Choose another file."
            )

    def _described(self) -> Described:
        """What this run measures, known after a trace of the step."""
        step = self._train_step
        parts = tuple(part.name for part in parts_in(step))
        return Described(tensors_of(step), tuple(lacks_of(step, self._replicas)), tuple(gauges_of(step)), parts)

    def _begin_stream(self, vectors: Mapping[str, np.ndarray]) -> None:
        """Writes the schema, unless the file to continue has it."""
        if self._schema is not None and self._file.end:
            return
        self._what = self._described()
        if not watched_by(self._train_step) and {"counts", "amax"} & {*vectors}:
            warnings.warn(
                "Trace: the step returns counts or amax, but has no `probes` to name their rows: they are not "
                "written. Use TrainStep(..., probes=hs.observe.watch(model)).",
                TraceWarning,
                stacklevel=3,
            )
        schema = schema_of(*self._what)
        if not self._file.end:
            self._file.add(opening(schema))
        self._schema = schema

    def _gauge_rows(self, visit: Visit) -> list[np.ndarray | None] | None:
        """What the ready probes measured at each step; None at one at which they measured nothing."""
        if not self._what.gauges:
            return None
        values = gauge_values(visit.vectors, self._train_step)
        return _rows(values, ~np.isnan(values).all(axis=1))

    def _frames(self, visit: Visit, seen: Seen | None) -> tuple[list[Frame], list[Frame], int]:
        """The frames to write, those to hold, and the last skipped step."""
        steps = visit.first + np.arange(visit.counters.data - visit.first + 1)
        skips = steps[skipped(visit.outputs)].tolist()
        last_skip = skips[-1] if skips else self._last_skip
        due = np.zeros(len(steps), bool)
        due[self._cadence.rows(visit)] = True
        if seen is None:
            return [], [], last_skip
        counts = np.concatenate([visit.vectors[one.output("counts")] for one in watched_by(self._train_step)], axis=1)
        # Steps at which the probes did not count have zeros.
        counted = seen.rows
        counted[counted] = counts[counted].any(axis=(1, 2))
        rows = np.flatnonzero(counted & ~due)
        held = np.array([frame.step for frame in self._held], np.int64)
        known = [self._last_skip, *skips] if self._last_skip else skips
        write, keep = choose(np.concatenate([held, steps[rows]]), known, visit.counters.data, self._window)
        due[rows] = write[len(held) :]
        new_held = rows[keep[len(held) :]]
        writing = [frame for frame, now in zip(self._held, write, strict=False) if now]
        holding = [frame for frame, later in zip(self._held, keep, strict=False) if later]
        return (
            writing + [frame_of(int(steps[row]), counts[row]) for row in np.flatnonzero(counted & due)],
            holding + [frame_of(int(steps[row]), counts[row]) for row in new_held],
            last_skip,
        )


def _rows(values: np.ndarray, known: np.ndarray) -> list[np.ndarray | None]:
    return [row if here else None for row, here in zip(values, known, strict=True)]


_COUNTED = (
    "The names differ only in the numbers that Keras gives to layers of one kind. Keras goes on counting when a "
    "process makes a model a second time, for example when a notebook's cell is run again. Call "
    "keras.utils.clear_session() before making the model, or name its layers."
)


def _without_counts(tensors: list[Tensor] | None) -> list[Tensor] | None:
    """The tensors without the numbers that Keras appends to a name, as in `dense_1`."""
    if tensors is None:
        return None
    return [dataclasses.replace(tensor, name=re.sub(r"_\d+(?=/|$)", "", tensor.name)) for tensor in tensors]


def _names(tensors: list[Tensor] | None) -> str:
    if tensors is None:
        return "another version"
    names = [tensor.name for tensor in tensors]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "no tensors"


MOST = 2**28
"""The most bytes of the histograms that a checkpoint holds: a hundred steps of a thousand tensors take a third."""
AFTER = 4
"""The number of steps after a skip whose histograms are also written."""


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
