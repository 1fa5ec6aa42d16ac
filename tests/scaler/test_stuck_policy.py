"""Guards when a scaler counts as stuck, to the step, and what `check` does then."""

import warnings

import pytest
import tensorflow as tf
from scaler_cases import by_hand, said

import scaler
from scaler import Event, LossScaler, StuckError, StuckPolicy, StuckWarning
from scaler.outcome.stuck import History, Reading

LOW, HIGH = 0.25, 64.0


def problem(policy, reading, low=LOW, high=HIGH):
    return policy.problem([Reading(0, 0, 0, 0.0), reading], low, high)


def test_the_default_is_a_hundred_in_a_row_or_seven_in_ten_of_two_hundred_and_nothing_else():
    assert StuckPolicy() == StuckPolicy(
        "raise",
        consecutive_skips=100,
        at_floor=False,
        at_ceiling=False,
        skip_rate=0.7,
        consecutive_bad_losses=50,
        bad_loss_rate=0.2,
        over=200,
    )
    assert problem(StuckPolicy(), Reading(2000, 1400, 99, LOW)) is None
    assert problem(StuckPolicy(), Reading(2000, 1401, 0, LOW)) == "1401 of the last 2000 steps were skipped"
    assert problem(StuckPolicy(), Reading(199, 199, 99, LOW)) is None
    assert problem(StuckPolicy(), Reading(2000, 0, 0, HIGH)) is None
    assert problem(StuckPolicy(), Reading(2000, 100, 100, LOW))
    never = StuckPolicy(consecutive_skips=None, skip_rate=None)
    assert problem(never, Reading(2000, 2000, 2000, LOW)) is None


@pytest.mark.parametrize(
    ("scale", "row", "stuck"),
    [(LOW, 1, True), (LOW, 2, True), (LOW / 2, 1, True), (LOW, 0, False), (2 * LOW, 1, False)],
)
def test_stuck_at_the_floor_when_a_step_was_skipped_there(scale, row, stuck):
    said = problem(StuckPolicy(at_floor=True), Reading(10, 5, row, scale))
    assert said == ("a step was skipped and the loss scale is at its floor, 0.25" if stuck else None)
    assert problem(StuckPolicy(), Reading(10, 5, row, scale)) is None


@pytest.mark.parametrize(
    ("row", "bad", "stuck"), [(1, 1, False), (3, 3, False), (3, 2, True), (2, 0, True), (0, 0, False)]
)
def test_the_floor_passes_over_bad_data(row, bad, stuck):
    said = problem(StuckPolicy(at_floor=True), Reading(100, 5, row, LOW, bad, bad))
    assert (said is not None) == stuck


DATA = "because of a loss that was not finite, which no loss scale helps: look at the data"


def test_bad_data_has_limits_of_its_own():
    policy = StuckPolicy(consecutive_bad_losses=3, bad_loss_rate=0.5, over=10)
    said = problem(policy, Reading(9, 3, 3, 8.0, 3, 3))
    assert said.startswith(f"3 steps since the last applied one were skipped {DATA}")
    assert problem(policy, Reading(9, 9, 9, 8.0, 2, 2)) is None
    said = problem(policy, Reading(10, 7, 1, 8.0, 6, 0))
    assert said.startswith(f"6 of the last 10 steps were skipped {DATA}")
    assert problem(policy, Reading(10, 7, 1, 8.0, 5, 0)) is None
    assert problem(policy, Reading(9, 9, 1, 8.0, 9, 0)) is None
    assert problem(StuckPolicy(), Reading(2000, 1400, 49, LOW, 400, 49)) is None
    assert problem(StuckPolicy(), Reading(2000, 1400, 50, LOW, 400, 50))
    assert problem(StuckPolicy(), Reading(2000, 1400, 0, LOW, 401, 0))
    never = StuckPolicy(consecutive_bad_losses=None, bad_loss_rate=None)
    assert problem(never, Reading(2000, 1400, 99, LOW, 1400, 99)) is None


def test_the_other_limits_count_bad_data():
    others = StuckPolicy(consecutive_bad_losses=None, bad_loss_rate=None)
    assert problem(others, Reading(2000, 1400, 100, LOW, 1400, 100))
    assert problem(others, Reading(2000, 1401, 0, LOW, 1401, 0))


@pytest.mark.parametrize(("scale", "stuck"), [(HIGH, True), (2 * HIGH, True), (HIGH / 2, False)])
def test_stuck_at_the_ceiling(scale, stuck):
    said = problem(StuckPolicy(at_ceiling=True), Reading(10, 0, 0, scale))
    assert said == ("the loss scale is at its ceiling, 64" if stuck else None)
    assert problem(StuckPolicy(), Reading(10, 0, 0, scale)) is None


def test_a_scale_that_cannot_move_is_at_no_bound():
    policy = StuckPolicy(at_floor=True, at_ceiling=True)
    assert problem(policy, Reading(10, 5, 1, 8.0), 8.0, float("8")) is None
    assert problem(policy, Reading(10, 5, 1, 8.0), 9.0, 8.0) is None
    assert problem(policy, Reading(10, 5, 1, 8.0), 8.0, 9.0)
    assert problem(policy, Reading(10, 5, 0, 8.0), 7.0, 8.0)


@pytest.mark.parametrize(("skipped", "stuck"), [(0, False), (5, False), (6, True), (10, True)])
def test_stuck_when_more_than_a_share_was_skipped(skipped, stuck):
    policy = StuckPolicy(skip_rate=0.5, over=10)
    # Of the last ten steps: what came before does not count.
    readings = [Reading(0, 0, 0, 0.0), Reading(20, 20, 0, 8.0), Reading(30, 20 + skipped, 0, 8.0)]
    said = policy.problem(readings, LOW, HIGH)
    assert said == (f"{skipped} of the last 10 steps were skipped" if stuck else None)


def test_a_share_is_of_the_shortest_time_that_is_long_enough():
    policy = StuckPolicy(skip_rate=0.5, over=10)
    before = [Reading(0, 0, 0, 0.0), Reading(5, 4, 0, 8.0), Reading(9, 5, 0, 8.0), Reading(12, 8, 0, 8.0)]
    assert policy.problem([*before[:2], Reading(9, 9, 0, 8.0)], LOW, HIGH) is None
    assert policy.problem([*before, Reading(19, 11, 0, 8.0)], LOW, HIGH) == "6 of the last 10 steps were skipped"
    assert policy.problem([*before, Reading(18, 12, 0, 8.0)], LOW, HIGH) == "8 of the last 13 steps were skipped"
    assert policy.problem([*before, Reading(22, 8, 0, 8.0)], LOW, HIGH) is None


def test_history_keeps_one_reading_from_long_enough_ago_and_all_since():
    history = History(10)
    kept = {4: [0, 4], 8: [0, 4, 8], 12: [0, 4, 8, 12], 14: [4, 8, 12, 14], 17: [4, 8, 12, 14, 17], 40: [17, 40]}
    for attempted, want in kept.items():
        history.add(Reading(attempted, 0, 0, 8.0))
        assert [reading.attempted for reading in history.readings] == want
    assert History(10).readings == [Reading(0, 0, 0, 0.0)]


def test_history_forgets_when_an_earlier_step_was_restored():
    history = History(10)
    for attempted in (30, 30, 35, 7):
        history.add(Reading(attempted, attempted, 0, 8.0))
    assert [reading.attempted for reading in history.readings] == [7]
    history.add(Reading(7, 7, 0, 8.0))
    assert [reading.attempted for reading in history.readings] == [7, 7]


def test_history_begins_where_nobody_has_looked():
    history = History(10)
    history.begin(Reading(50, 40, 0, 8.0))
    assert [reading.attempted for reading in history.readings] == [50]
    history.begin(Reading(60, 40, 0, 8.0))
    assert [reading.attempted for reading in history.readings] == [50]
    history.forget()
    history.add(Reading(70, 40, 0, 8.0))
    assert [reading.attempted for reading in history.readings] == [70]


def test_history_of_one_step():
    history = History(1)
    for attempted in (1, 2, 3):
        history.add(Reading(attempted, 0, 0, 8.0))
    assert [reading.attempted for reading in history.readings] == [2, 3]


def test_refused_with_the_value_and_what_is_allowed(snapshot):
    given = [{"action": value} for value in ("stop", None)]
    given += [{"consecutive_skips": value} for value in (0, 2.5, True)]
    given += [{"skip_rate": value} for value in (0, 1.0, 1.5, -0.5, float("nan"), "often")]
    given += [{"consecutive_bad_losses": 0}, {"bad_loss_rate": 1}, {"over": 0}, {"over": None}]
    given += [{"at_floor": "yes"}, {"at_ceiling": "yes"}]
    assert [said(lambda one=one: StuckPolicy(**one)) for one in given] == snapshot


def test_a_policy_is_frozen_and_its_numbers_are_named():
    policy = StuckPolicy("warn", skip_rate=0.5, consecutive_skips=1, over=1)
    with pytest.raises(AttributeError):
        policy.over = 5
    with pytest.raises(TypeError):
        StuckPolicy("warn", 100)


def skip(loss_scaler, times=1):
    for _ in range(times):
        loss_scaler.update(Event(tf.constant(False)))


def test_check_raises_at_each_visit_while_stuck():
    loss_scaler = by_hand(scaler.Dynamic(8.0), stuck=StuckPolicy(consecutive_skips=3))
    skip(loss_scaler, 2)
    loss_scaler.check()
    skip(loss_scaler)
    for _ in range(2):
        with pytest.raises(StuckError, match="stuck: 3 steps in a row were skipped, the last at loss scale 1"):
            loss_scaler.check()
    loss_scaler.update(Event(tf.constant(True)))
    loss_scaler.check()


def test_check_raises_with_the_reason_of_the_last_skip():
    weight = tf.Variable([1.0], name="head")
    loss_scaler = by_hand(scaler.Dynamic(8.0), stuck=StuckPolicy(consecutive_skips=1))
    loss_scaler.apply(lambda grads, variables: None, [tf.constant([float("nan")])], [weight])
    with pytest.raises(StuckError, match="the gradient of 'head:0' is the first with a NaN"):
        loss_scaler.check()


def test_check_warns_once_each_time_it_gets_stuck():
    loss_scaler = LossScaler(scaler.Dynamic(8.0), stuck=StuckPolicy("warn", consecutive_skips=2))
    for _ in range(2):
        skip(loss_scaler, 2)
        with pytest.warns(StuckWarning, match="2 steps in a row"):
            loss_scaler.check()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_scaler.check()
            loss_scaler.update(Event(tf.constant(True)))
            loss_scaler.check()


def test_check_is_for_the_host():
    loss_scaler = LossScaler()
    with pytest.raises(scaler.InvalidArgument, match=r"outside of the tf\.function"):
        tf.function(loss_scaler.check)()
