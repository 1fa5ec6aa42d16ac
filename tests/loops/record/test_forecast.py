"""Guards the forecast: gradients as large as ever and a rising loss are both needed, in visits as in a whole trace."""

import json
import math
import types
import warnings

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loops
import scaler
from loops.record.forecast import LOSS_OF, RISE, Seen

pytestmark = pytest.mark.slow

STEPS = 120


def columns(log2_critical, loss, known=True):
    """Columns of a trace at the scale 2^10."""
    critical = 2.0 ** np.asarray(log2_critical, np.float64)
    steps = np.arange(1, len(critical) + 1)
    return {
        "step": steps,
        "loss": np.asarray(loss, np.float64),
        "loss_scale": np.full(len(steps), 2.0**10),
        "critical_low": np.where(known, critical, 0.0),
        "critical_high": critical,
        "headroom": np.full(len(steps), 7.0),
    }


def falling(start, by=0.1):
    """The critical scale stays at 2^20, and falls from a step on."""
    return 20 - by * np.maximum(np.arange(1, STEPS + 1) - start, 0)


def rising(start, by=0.05):
    return 1 + by * np.maximum(np.arange(1, STEPS + 1) - start, 0)


def test_both_together_are_an_alarm():
    alarm = loops.observe.forecast(columns(falling(60), rising(60)))
    # The mean loss must have risen by its share, after which nothing is waited for.
    assert 60 + RISE / 0.05 < alarm.step <= 60 + RISE / 0.05 + LOSS_OF
    assert alarm.left == pytest.approx(20 - 0.1 * (alarm.step - 60) - 10)
    assert alarm.headroom == 7.0
    assert RISE <= alarm.rise < RISE + 0.05
    for said in (f"at step {alarm.step} ", f"{alarm.left:.0f} octaves", f"by {alarm.rise:.0%}", "learning rate"):
        assert said in str(alarm)


def test_steps_that_say_nothing_are_left_out():
    known = np.arange(STEPS) % 3 > 0
    known[0] = True
    whole = columns(falling(60), rising(60), known)
    part = {name: values[known] for name, values in columns(falling(60), rising(60)).items()}
    found = loops.observe.forecast({**part, "step": np.arange(1, np.sum(known) + 1)})
    assert loops.observe.forecast(whole) == found._replace(step=part["step"][found.step - 1])


def test_columns_that_are_missing_are_named():
    given_ = columns(falling(60), rising(60))
    del given_["headroom"]
    for bad in (given_, None, [1.0]):
        with pytest.raises(scaler.InvalidArgument, match="expected the columns step, loss"):
            loops.observe.forecast(bad)


def test_steps_that_begin_in_the_middle_are_refused():
    """Gradients of a run that is nearly done are always as large as they were a few steps ago."""
    rest = {name: values[5:] for name, values in columns(falling(60), rising(60)).items()}
    with pytest.raises(scaler.InvalidArgument, match="begin with 6"):
        loops.observe.forecast(rest)


@pytest.fixture(scope="module")
def step():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, dtype="mixed_float16", name="dense")])
    names = ["activations/dense", "weight_gradients/dense/kernel"]
    return types.SimpleNamespace(probes=types.SimpleNamespace(names=names, model=model, dtypes={"dense": ("float16",)}))


def visits(log2_critical, loss, ends):
    for first, last in zip([0, *ends], [*ends, len(loss)], strict=True):
        rows = slice(first, last)
        # At the scale 2^10 a gradient of 2^(25 - c) has the critical scale 2^c.
        gradients = 2.0 ** (25 - np.asarray(log2_critical)[rows])
        amax = np.stack([np.ones(last - first), gradients], axis=1).astype(np.float32)
        outputs = {"loss": np.asarray(loss, np.float64)[rows], "loss_scale": np.full(last - first, 2.0**10)}
        yield loops.Visit(loops.Counters(last, last, last), outputs, 0.0, last, {"amax": amax})


def test_a_state_is_json():
    action = loops.Forecast()
    action._seen = Seen(headroom=(1.0, math.inf), best=math.inf)
    text = json.dumps(action.save_state(), allow_nan=False)
    again = loops.Forecast()
    again.load_state(json.loads(text))
    assert again._seen == action._seen


@settings(max_examples=30)
@given(st.sets(st.integers(1, STEPS - 1)).map(sorted), st.integers(0, STEPS))
def test_an_action_sees_the_same_in_visits_and_over_a_resume(step, ends, resumed_at):
    critical, loss = np.floor(falling(60)), rising(60)
    expected = loops.observe.forecast(columns(critical, loss))
    said = []
    action = loops.Forecast()
    action.begin(types.SimpleNamespace(train_step=step))
    for visit in visits(critical, loss, ends):
        if visit.first >= resumed_at:
            state = action.save_state()
            action = loops.Forecast()
            action.load_state(state)
            action.begin(types.SimpleNamespace(train_step=step))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action(visit)
        said += [str(one.message) for one in caught if one.category is loops.DivergenceWarning]
    assert len(said) == 1
    assert said[0].startswith(str(expected).partition("Gradients")[0])
    assert not math.isinf(expected.rise)


def test_without_probes_it_cannot_work():
    with pytest.raises(scaler.InvalidArgument, match=r"probes=hs\.observe\.watch"):
        loops.Forecast().begin(types.SimpleNamespace(train_step=lambda batch: {}))


def test_an_action_that_begins_in_the_middle_says_that_it_is_of_no_use(step):
    action = loops.Forecast()
    action.begin(types.SimpleNamespace(train_step=step))
    _, *rest = visits(np.floor(falling(60)), rising(60), [40, 80])
    with pytest.warns(loops.ResumeWarning, match="begins at step 41"):
        action(rest[0])
    action(rest[1])


def test_probes_without_gradients_are_refused():
    probes = types.SimpleNamespace(kinds=("activations",))
    with pytest.raises(scaler.InvalidArgument, match="measure activations, but it needs gradients"):
        loops.Forecast().begin(types.SimpleNamespace(train_step=types.SimpleNamespace(probes=probes)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"critical_low": np.full(STEPS, np.nan)}, "no critical scales"),
        ({"critical_low": np.full(STEPS, np.inf)}, "no critical scales"),
        ({"step": np.r_[1:60, 61 : STEPS + 2]}, "step 61 follows step 59"),
        ({"loss": 1.0}, r"loss \[\]"),
        ({"headroom": np.ones(1)}, r"headroom \[1\]"),
        ({"loss": ["a"] * STEPS}, "expected the columns"),
    ],
)
def test_a_trace_that_says_nothing_is_refused(changes, match):
    with pytest.raises(scaler.InvalidArgument, match=match):
        loops.observe.forecast({**columns(falling(60), rising(60)), **changes})
