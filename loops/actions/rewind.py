"""Goes back before spikes, and leaves the batches around them out.

Which batches of a dataset a run leaves out: a file that a person can edit.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaler
from loops.actions.checkpoint import Checkpoint
from loops.loop.state import folder
from loops.loop.visit import Visit
from loops.step.user_steps import find
from loops.support.errors import LoopError, OutOfData, check, check_count, is_count
from loops.support.json_values import read_object
from loops.support.written import writing

if TYPE_CHECKING:
    from loops.loop.loop import Loop

_SPIKE = int(scaler.Cause.SPIKE)


class Rewind:
    """After several spikes, goes back to a checkpoint before them, and leaves out the batches around them.

        step = loops.TrainStep(..., loss_scaler=scaler.LossScaler(scaler.SpikeGuard(scaler.Dynamic())))
        saves = loops.Checkpoint("run/checkpoints", every=100, keep=5, resume=True)
        loop = loops.Loop(step, dataset, actions=[saves, loops.Rewind(to=100, skip=300)])

    One spike costs its batch, which a `scaler.SpikeGuard` holds back. Several in a row say that the weights, the slots
    and the data have come together badly, and more of the same may follow. If `spikes` steps of the last `to` were
    skipped as spikes, the run is restored from the newest checkpoint at least `to` steps before the first of them.
    From there it takes the same steps again, without `skip` batches that begin `to` batches before the first spike.
    Later checkpoints, and what the other actions wrote of later steps, are removed as when a killed run resumes.

    The batches stand in `skip_batches.json` in the folder of the checkpoints, counted from 1 in the order of the
    dataset: `{"skip": [{"first": 4801, "last": 5100}]}`. A person may add others to it, or take some out. The file is
    read when a run begins and when it goes back. It has no effect on batches that were taken before. `rewound_to` in
    one of its lines is this action's own note: a person leaves it out. A run that is killed at any moment and
    resumes ends with the same bits as one that is not, and those are the bits of a run over a dataset without these
    batches.

    Args:
        to: How many steps before the first spike to go back, at least 1.
        skip: How many batches to leave out, more than `to`, so that the first spike is among them. They go on to the
            last spike if that is later.
        spikes: How many spikes within `to` steps it takes: `to` at most, and not more than the guard allows in a row.
        most: How often a run goes back before it ends with a `LoopError`: then no batch is to blame.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work. When the run begins, if the loop has no `Checkpoint`,
            or a guard that does not allow as many spikes in a row.
        LoopError: If there is no checkpoint so far back, the position in the dataset cannot be saved, or the loop has
            several workers.

    References:
        Chowdhery et al. 2022, PaLM (https://arxiv.org/abs/2204.02311), section 5.1: a restart from a checkpoint about
        100 steps before the spike, without 200 to 500 batches. The same batches did no harm at another state.
    """

    must_visit = True
    """Its `next_visit` also limits calls of a fixed number of steps."""

    def __init__(self, to: int, skip: int, *, spikes: int = 3, most: int = 10):
        check_count(f"Rewind(to={to!r})", to)
        check_count(f"Rewind(skip={skip!r})", skip, int(to) + 1)
        check_count(f"Rewind(spikes={spikes!r})", spikes)
        check_count(f"Rewind(most={most!r})", most)
        check(
            f"Rewind(to={to}, spikes={spikes})", spikes <= to, f"no more spikes than steps: {spikes} of {to} never are"
        )
        self._to, self._skip, self._spikes, self._most = int(to), int(skip), int(spikes), int(most)
        self.stopped: str | None = None
        self.goes_back = False
        self._loop: Loop | None = None
        self._saves: Checkpoint | None = None
        self._entries: list[LeftOut] = []
        self._seen: list[tuple[int, int]] = []
        self._rewinds = self._taken = self._done = 0

    def save_state(self) -> dict[str, Any]:
        """How many batches were taken or left out, and the last spikes."""
        return {"taken": self._taken, "spikes": [list(one) for one in self._seen]}

    def load_state(self, value: dict[str, Any]) -> None:
        """Makes the next run go on after that many batches."""
        self._taken = int(value["taken"])
        self._seen = [(int(step), int(batch)) for step, batch in value["spikes"]]

    def load_no_state(self, step: int) -> None:
        """Has the next run go on after a checkpoint that was saved without this action."""
        self._taken, self._seen = step, []

    def begin(self, loop: Loop) -> None:
        """Before the first step: goes back if that is due, and leaves out the batches that come next.

        Raises:
            scaler.InvalidArgument: If the loop has no `Checkpoint`, or a guard that does not allow as many spikes in a
                row.
            LoopError: If its data or its workers do not allow it, `skip_batches.json` has another form, or a checkpoint
                that a killed run was going back to is gone.
        """
        saves = next((action for action in loop.actions if isinstance(action, Checkpoint)), None)
        if saves is None:
            raise scaler.InvalidArgument(
                "Rewind: the loop has no hs.Checkpoint among its actions to go back to: expected one, such as "
                "hs.Checkpoint('run/checkpoints', every=100)."
            )
        if loop.workers.count > 1:
            raise LoopError("Rewind on several workers: they would have to go back together. Use one process.")
        saves.begin(loop)
        if loop.position.problem:
            raise LoopError(
                f"Rewind: the position in this dataset cannot be saved, and without it batches cannot be left out "
                f"exactly: {loop.position.problem}."
            )
        if not isinstance(loop.position.iterator, tf.data.Iterator):
            raise LoopError(
                "Rewind: batches are left out of a tf.data.Dataset alone, and this loop takes them from elsewhere."
            )
        if self._loop is not loop:
            self._check_guards(loop)
        elif not self.goes_back:
            # The steps of a call that failed were counted, and never reported.
            self._taken += loop.counters.data - self._done
        self._loop, self._saves = loop, saves
        self._finish_going_back(loop, saves)
        self._entries = _read_left_out(saves.place)
        self._rewinds = sum(entry.rewound_to is not None for entry in self._entries)
        self.stopped, self.goes_back = None, False
        self._done = loop.counters.data
        self._leave_out()

    def _check_guards(self, loop: Loop) -> None:
        """Refuses a guard by which the length of calls would decide whether the run goes back or is stuck."""
        for one in find(loop.calls.trace()).scalers:
            guard = one.strategy
            if isinstance(guard, scaler.SpikeGuard) and self._spikes > guard.most_in_a_row:
                raise scaler.InvalidArgument(
                    f"Rewind(spikes={self._spikes}) with SpikeGuard(window={guard.window}, share={guard.share:g}): the "
                    f"guard allows {guard.most_in_a_row} spikes in a row, and more are a StuckError: expected spikes="
                    f"{guard.most_in_a_row} or fewer, or a larger window or share."
                )

    def _finish_going_back(self, loop: Loop, saves: Checkpoint) -> None:
        """Goes back if the run has decided to, in this process or in one that was killed meanwhile."""
        under_way = saves.place / UNDER_WAY
        decided = _read_left_out(saves.place, UNDER_WAY)[-1:]
        for entry in decided if loop.counters.data else ():
            number = entry.rewound_to
            if number is None or number not in folder.numbers(saves.place):
                raise LoopError(
                    f"{under_way}: the run was going back to step {number}, and that checkpoint is gone. Remove this "
                    "file to go on from the newest one."
                )
            entries = _read_left_out(saves.place)
            if entry not in entries:
                _write_left_out(saves.place, [*entries, entry])
            saves.go_back(loop, number)
        under_way.unlink(missing_ok=True)

    def next_visit(self, done: int) -> int | None:
        """The step after which the next batches are left out; None if there are none."""
        following = next_of(self._entries, self._taken)
        return None if following is None else done + following.first - 1 - self._taken

    def __call__(self, visit: Visit) -> None:
        """Looks for spikes in the steps of the visit, and leaves out the batches that come next.

        Raises:
            scaler.InvalidArgument: If the step does not return its `cause`.
            LoopError: If there is no checkpoint to go back to, or the run went back too often.
        """
        if "cause" not in visit.outputs:
            raise scaler.InvalidArgument(
                "Rewind: the step returns no 'cause', by which spikes are known: expected outcome.cause among its "
                "outputs, as those of an hs.TrainStep with an hs.SpikeGuard."
            )
        found = np.flatnonzero(visit.outputs["cause"] == _SPIKE).tolist()
        self._seen += [(visit.first + row, self._taken + row + 1) for row in found]
        self._taken += visit.counters.data - self._done
        self._done = visit.counters.data
        near = self._together()
        if near:
            self._go_back(near)
        else:
            self._leave_out()

    def left_out_between(self, facts: Mapping, folder: pathlib.Path, steps: int) -> LeftOut | None:
        """Batches that the run left out within some steps after a checkpoint; None if it left out none there.

        Args:
            facts: Those of the checkpoint; empty for the beginning of the run.
            folder: Of the checkpoints.
            steps: How many steps after the checkpoint are looked at.
        """
        taken = _taken_at(facts)
        found = next_of(_read_left_out(folder), taken)
        return found if found is not None and found.first - 1 - taken < steps else None

    def _together(self) -> list[tuple[int, int]]:
        """The first spikes that are enough of them within `to` steps, and all since; the older ones are forgotten."""
        for place, (step, _) in enumerate(self._seen):
            if sum(step <= other < step + self._to for other, _ in self._seen) >= self._spikes:
                return self._seen[place:]
        self._seen = [(step, batch) for step, batch in self._seen if step > self._done - self._to]
        return []

    def _go_back(self, near: list[tuple[int, int]]) -> None:
        """Notes what to leave out, and ends this part of the run: the next one begins at the checkpoint."""
        assert self._saves is not None
        (step, batch), last = near[0], near[-1][1]
        if self._rewinds >= self._most:
            raise LoopError(
                f"Rewind: the run went back {self._rewinds} times, and spikes came again at step {step}. No batch is "
                "to blame: lower the learning rate, clip the gradients, or look at the weights."
            )
        self._saves.wait()  # A checkpoint that a thread still writes may be the one.
        target, place = step - self._to, self._saves.place
        number, facts, _ = folder.newest_whole(place, max(target, 0))
        if number is None:
            kept = folder.numbers(place)
            there = f"the first that is kept is of step {kept[-1]}" if kept else "there is none at all"
            raise LoopError(
                f"Rewind(to={self._to}): the spikes began at step {step}, and no checkpoint is at or before step "
                f"{target}: {there}. Save more often, or keep more of them: Checkpoint(every=, keep=)."
            )
        taken = _taken_at(facts)
        first = max(batch - self._to, taken + 1)
        entry = LeftOut(first, max(first + self._skip - 1, last), number)
        # A person may have changed the file since the run began.
        entries = _read_left_out(place)
        # It has to go back at once if the process is killed from here on.
        _write_left_out(place, [entry], UNDER_WAY)
        _write_left_out(place, [*entries, entry])
        self._saves.save_no_more()
        self.goes_back = True
        self.stopped = f"spikes at step {step}: the run goes back to step {number}"

    def _leave_out(self) -> None:
        assert self._loop is not None
        following = next_of(self._entries, self._taken)
        if following is None or following.first > self._taken + 1:
            return
        iterator = self._loop.position.iterator
        while self._taken < following.last:
            if next(iterator, None) is None:
                raise OutOfData(f"the dataset ended after {self._taken} batches, while Rewind left some of them out.")
            self._taken += 1


def _taken_at(facts: Mapping) -> int:
    """How many batches of the dataset were taken or left out when a checkpoint was saved."""
    if not facts:
        return 0
    state = facts["actions"].get(Rewind.__name__)
    return int(state["taken"]) if isinstance(state, dict) and "taken" in state else int(facts["counters"]["data"])


NAME = "skip_batches.json"
"""The file, in the folder of the checkpoints."""
UNDER_WAY = "rewind_under_way.json"
"""A file of the same form next to it, from the decision to go back until the run has. A person writes none."""
_EXAMPLE = '{"skip": [{"first": 4801, "last": 5100}]}'


class LeftOut(NamedTuple):
    """Batches that are left out, counted from 1 in the order of the dataset.

    Attributes:
        first: The first of them.
        last: The last.
        rewound_to: The step of the checkpoint that the run went back to for them; None if a person wrote them. It tells
            a person, and counts; nothing goes back because of it.
    """

    first: int
    last: int
    rewound_to: int | None = None


def _read_left_out(folder: pathlib.Path, name: str = NAME) -> list[LeftOut]:
    """What the file says, in its order; nothing if there is none.

    Raises:
        LoopError: If it has another form.
    """
    path = folder / name
    try:
        entries = read_object(path.read_text(encoding="utf-8")).get("skip")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LoopError(f"{path}: it cannot be read ({error}): expected {_EXAMPLE}.") from error
    if not isinstance(entries, list):
        raise LoopError(f"{path}: it has no list named skip: expected {_EXAMPLE}.")
    return [_entry(path, entry) for entry in entries]


def _entry(path: pathlib.Path, entry: Any) -> LeftOut:
    first: Any
    last: Any
    back: Any
    first, last, back = (entry.get(name) if isinstance(entry, dict) else None for name in LeftOut._fields)
    if not (is_count(first) and is_count(last) and first <= last and (back is None or is_count(back))):
        raise LoopError(f"{path}: {json.dumps(entry)[:100]} is not the first and the last of some batches: {_EXAMPLE}.")
    return LeftOut(first, last, back)


def _write_left_out(folder: pathlib.Path, entries: list[LeftOut], name: str = NAME) -> None:
    """Replaces the file, which is whole at any moment.

    Raises:
        NotWritable: If it cannot be written.
    """
    named = [{name: value for name, value in entry._asdict().items() if value is not None} for entry in entries]
    temporary = folder / f"{name}.tempstate0"  # A checkpoint's own leftovers, which are swept, have such names.
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in named)
    with writing("Rewind", folder / name):
        temporary.write_text(f'{{"skip": [\n{lines}\n]}}\n', encoding="utf-8")
        temporary.replace(folder / name)


def next_of(entries: list[LeftOut], taken: int) -> LeftOut | None:
    """The next batches to leave out after the first `taken` of the dataset, those that touch them included."""
    after = sorted((entry for entry in entries if entry.last > taken), key=lambda entry: entry[:2])
    if not after:
        return None
    first, last = max(after[0].first, taken + 1), after[0].last
    for entry in after[1:]:
        last = max(last, entry.last) if entry.first <= last + 1 else last
    return LeftOut(first, last)
