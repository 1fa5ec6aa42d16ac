"""Guards `Turns.nearest`: how far it is to a turn, by going there call by call."""

import pytest

from loops.step.parts import Turns


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_nearest_turn_is_the_last_one_or_else_the_first(window, every):
    turns = Turns(window)
    due = []
    for _ in range(4 * every * window):
        due.append(bool(turns.due(every)))
        turns.end()
    turns.go_back(len(due))
    for call, now in enumerate(due):
        past = [one for one in range(call) if due[one]]
        # Of a window the last micro-batch, which decides.
        first = next(one for one, turn in enumerate(due) if turn) + window - 1
        expected = 0 if now else (past[-1] if past else first) - call
        assert turns.nearest(every) == expected, call
        turns.end()
