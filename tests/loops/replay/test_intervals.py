"""Guards how sure a replay is: exact up to the first skip that may differ, and no surer after it than it may be."""

import dataclasses
import json
import math

import numpy as np
import pytest
from replay_cases import tables

import loops
from loops.replay.intervals import Tail, as_far_behind, half_widths, of_pairs, tail_of, wider
from loops.replay.recording import recording_of
from loops.replay.replay import static_scale

STEPS = 40
GROWING = "dynamic:initial_scale=1024,growth_interval=2"


def difference(steps=20, skips=1.0, octaves=0.5, final=1.0, flushed=0.1):
    return Tail(steps, skips, octaves, final, 0.1, 0.1, flushed)


def seed(number, steps=STEPS):
    """A run whose largest gradients lie at random around one, so that its limit is about 2^16."""
    return tables(2.0 ** np.random.default_rng(number).normal(0, 1, steps))


def replayed(trace, strategy=GROWING, **options):
    return loops.observe.replay(trace, strategy, **options).strategies[0]


@pytest.mark.parametrize(("count", "rank"), [(8, None), (9, 9), (10, 10), (18, 18), (19, 18), (29, 27)])
def test_the_rank_is_that_of_split_conformal_prediction(count, rank):
    found = half_widths([difference(octaves=float(one)) for one in range(count, 0, -1)])
    assert (found and found.octaves) == rank


def test_pairs_of_six_runs_hold_a_normal_figure_in_nine_of_ten():
    """The real run is one more draw, and the replay is any of the six."""
    draws = np.random.default_rng(0).normal(size=(4000, 7))
    held = 0
    for *runs, real in draws:
        half = half_widths(of_pairs([difference(octaves=run) for run in runs]))
        held += abs(real - runs[0]) <= half.octaves
    assert 0.88 < held / len(draws) < 0.93


def test_a_figure_that_one_difference_lacks_has_no_width():
    lacking = half_widths([difference() for _ in range(8)] + [difference(flushed=math.nan)])
    assert math.isnan(lacking.flushed)
    assert lacking.skips == 1.0
    for pair in [(lacking, difference(skips=3.0)), (difference(skips=3.0), lacking)]:
        assert (wider(*pair).skips, wider(*pair).flushed) == (3.0, 0.1)
    assert wider(None, lacking) is lacking
    assert wider(lacking, None) is lacking


def test_only_differences_over_about_as_many_steps_count():
    seen = [difference(steps) for steps in (9, 10, 20, 40, 41)]
    assert [(one.steps, one.skips) for one in as_far_behind(seen, 20)] == [(10, 2.0), (20, 1.0), (40, 1.0)]


def test_a_tail_has_the_figures_of_its_steps_alone():
    scales, skipped = np.float32([64, 2, 4, 16]), np.array([True, False, True, False])
    assert tail_of(scales, skipped, 32.0, (2.0, 16.0), 1)[:6] == (3, 1.0, 7 / 3, 5.0, 1 / 3, 1 / 3)


@pytest.mark.parametrize(
    ("strategy", "trace", "expected"),
    [
        ("static:8", {}, None),
        ("static:2**12", {"gradient": [1.0, 1.0, 40.0, 1.0]}, 3),
        # The step is as replayed, and none follows.
        ("static:2**12", {"gradient": [1.0, 1.0, 1.0, 40.0]}, None),
        # It was skipped at 2^8, and nobody knows what it does below.
        ("static:8", {"gradient": [1.0, 1e4, 1.0, 1.0], "scale": 2.0**8}, 2),
        ("static:2**8", {"gradient": [1.0, 1e4, 1.0, 1.0], "scale": 2.0**8}, None),
        ("static:8", {"cause": [None, "LOSS", None, None], "applied": [True, False, True, True]}, None),
        # At less than an octave below its limit another scale may overflow in a real run, whose rounding is another.
        ("static:2**12", {"gradient": [1.0, 1.0, 10.0, 1.0]}, 3),
        ("static:2**12", {"gradient": [1.0, 1.0, 10.0, 1.0], "scale": 2.0**12}, None),
        ("static:2**11", {"gradient": [1.0, 1.0, 10.0, 1.0]}, None),
    ],
)
def test_where_a_replay_leaves_the_recorded_run(strategy, trace, expected):
    found = replayed(tables(**{"gradient": [1.0] * 4, **trace}), strategy)
    assert (found.may_differ_at, found.intervals) == (expected, None)
    assert (found.highest_skip_rate == found.skip_rate) == (expected is None)


def test_six_seeds_give_intervals_and_five_a_sentence():
    runs = [seed(number) for number in range(6)]
    few = loops.observe.replay(runs[:5], GROWING)
    assert few.strategies[0].intervals is None
    assert "it takes the traces of 6 seeds with as many steps" in few.text()
    assert "here are 5 and 0" in few.lacking
    assert "There skips and rate hold, but for a few; mean scale" in few.text()
    enough = loops.observe.replay(runs, GROWING)
    (found,) = enough.strategies
    assert "are from seeds alone" in enough.lacking
    assert len(found.runs) == 6
    for one in (found, *found.runs):
        assert one.intervals.skips[0] <= one.skips <= one.intervals.skips[1] < len(one.scales)
        assert one.intervals.mean_log2_scale[0] < one.mean_log2_scale < one.intervals.mean_log2_scale[1]
        assert one.intervals.final_scale[0] <= one.final_scale <= one.intervals.final_scale[1]
        assert one.highest_skip_rate == one.intervals.skip_rate[1]
    assert found.intervals.skips[1] == sum(one.intervals.skips[1] for one in found.runs)
    text = enough.text()
    assert "90% of runs" in text
    assert "There skips and rate hold within their intervals; mean scale" in text
    assert "mean scale, final scale, flushed, floor and ceiling are indicative" in text


def test_runs_of_another_length_are_no_spread():
    runs = [seed(number) for number in range(5)]
    assert replayed([*runs, seed(5, STEPS // 2)]).intervals is None


def test_nothing_is_said_of_intervals_where_no_skip_differs():
    found = loops.observe.replay(tables([1.0] * 4), "static:8")
    assert found.lacking is None
    assert "every column holds" in found.text()


def test_what_skips_at_its_lowest_scale_may_go_on_to_the_end():
    runs = [tables([1.0] * 20 + [40.0] + [1.0] * 19) for _ in range(6)]
    found = loops.observe.replay(runs, ["static:2**12", GROWING])
    static, moving = (one.runs[0] for one in found.strategies)
    assert (static.may_differ_at, static.skips, static.intervals.skips, static.may_stall) == (21, 1, (1, 20), True)
    assert static.highest_skip_rate == 0.5
    assert not moving.may_stall
    # Six equal runs may agree by chance: one skip more or less is always possible.
    assert moving.intervals.skips == (moving.skips - 1, moving.skips + 1)
    assert "The skips of static:2**12 do not hold" in found.text()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("static:2**12+then:30+static:2**10", True),
        # Each step that overflows takes it to its floor at once, where nothing overflows when it is replayed.
        ("bounded:2**10,2**12+dynamic:initial_scale=2**12", False),
    ],
)
def test_what_lets_many_overflows_pass_may_stall(strategy, expected):
    trace = tables([1.0] * 20 + [40.0] + [1.0] * 19)
    assert replayed(trace, strategy).may_stall is expected


def kept(path, differences):
    rows = [{"difference": one and one._asdict()} for one in differences]
    path.write_text(json.dumps({"strategies": rows}).replace("NaN", "null"))
    return path


def test_validated_runs_give_intervals(tmp_path):
    few = kept(tmp_path / "few.json", [difference(30, flushed=math.nan)] * 8 + [None])
    one_more = kept(tmp_path / "more.json", [difference(30, skips=4.0, flushed=math.nan)])
    run = seed(0)
    assert replayed(run, validated=few).intervals is None
    found = replayed(run, validated=[few, one_more])
    low, high = found.intervals.mean_log2_scale
    part = (STEPS - found.may_differ_at + 1) / STEPS
    assert (low, high) == pytest.approx((found.mean_log2_scale - 0.5 * part, found.mean_log2_scale + 0.5 * part))
    assert found.intervals.final_scale == (found.final_scale / 2, found.final_scale * 2)
    assert found.intervals.skips[1] - found.skips >= 4
    assert found.intervals.flushed is None
    both = loops.observe.replay([seed(number) for number in range(6)], GROWING, validated=[few, one_more])
    assert both.lacking is None
    alone = replayed([seed(number) for number in range(6)]).runs[0].intervals
    for name in ("skips", "mean_log2_scale", "final_scale"):
        wide = getattr(both.strategies[0].runs[0].intervals, name)
        for narrow in (getattr(alone, name), getattr(found.intervals, name)):
            assert wide[0] <= narrow[0] <= narrow[1] <= wide[1]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"strategies": [3]}', '{"strategies": [{"difference": {"steps": 0}}]}']
)
def test_what_holds_no_validated_runs_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(loops.LoopError, match="cannot read validated runs"):
        replayed(seed(0), validated=tmp_path / "x.json")


def test_a_static_scale_is_one_at_which_a_run_follows_its_record():
    def found(*traces):
        return static_scale([recording_of(trace, "trace") for trace in traces])

    # An octave below the limits of 1638 and 655.
    assert found(tables([1.0, 40.0, 1.0])) == 2.0**9
    assert found(tables([1.0, 40.0, 1.0]), tables([100.0] * 3)) == 2.0**8
    # A skip that no scale helps is one in the repeated run, too: 1% of the steps may have it.
    hopeless = {"cause": ["LOSS", *[None] * 199], "applied": [False, *[True] * 199]}
    assert found(tables([1.0] * 200, **hopeless)) == 2.0**14
    often = {"cause": ["LOSS"] * 3 + [None] * 197, "applied": [False] * 3 + [True] * 197}
    assert found(tables([1.0] * 200, **often)) is None
    # What was skipped when it was recorded is uncertain at each lower scale.
    assert found(tables([1.0, 1e4, 1.0, 1.0], scale=2.0**8)) is None
    assert found() is None


def test_to_dict_is_json():
    found = loops.observe.replay([seed(number) for number in range(6)], [GROWING, "static:8"])
    (first, second) = json.loads(json.dumps(found.to_dict()))["strategies"]
    assert {*first["intervals"]} == {field.name for field in dataclasses.fields(found.strategies[0].intervals)}
    assert len(first["runs"]) == 6
    assert (second["intervals"], second["may_differ_at"]) == (None, None)
