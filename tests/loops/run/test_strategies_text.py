"""Guards strategies written as text: what they mean, and that any other text is named in one kind of error."""

import inspect

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import scaler
from loops.run.strategy_text import parse_strategy
from scaler.strategies import Bounded, RisingFloor, Scheduled, Warmup


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("none", scaler.NoScaling()),
        ("static:1024", scaler.Static(1024.0)),
        ("static:2**-126", scaler.Static(2.0**-126)),
        ("static:1e3", scaler.Static(1000.0)),
        ("dynamic", scaler.Dynamic()),
        ("dynamic:growth_interval=200,initial_scale=65536", scaler.Dynamic(65536, growth_interval=200)),
        ("dynamic:consecutive_hysteresis=True", scaler.Dynamic(consecutive_hysteresis=True)),
        ("headroom:headroom=2,format=bfloat16,memory=7", scaler.Headroom(headroom=2, format="bfloat16", memory=7)),
        ("histogram:dead_band=0.5,edge=2**12", scaler.Histogram(dead_band=0.5, edge=4096)),
        ("delayed_amax:format='float8_e5m2'", scaler.DelayedAmax(format="float8_e5m2")),
        ("log_normal:repaired=False", scaler.LogNormal(repaired=False)),
        ("smooth:initial_scale=1,search=True", scaler.Smooth(1.0, search=True)),
        ("pytorch", scaler.presets.pytorch()),
        ("deepspeed:hysteresis=3,min_scale=2**-4", scaler.presets.deepspeed(hysteresis=3, min_scale=2.0**-4)),
        ("fairseq:tolerance=0.4,threshold=None", scaler.presets.fairseq(tolerance=0.4)),
        ("tf_contrib:initial_scale=8,growth_interval=5", scaler.presets.tf_contrib(8, growth_interval=5)),
        ("optax_apply_if_finite", scaler.NoScaling()),
        ("warmup:100+dynamic", Warmup(scaler.Dynamic(), 100)),
        ("warmup:steps=100+dynamic", Warmup(scaler.Dynamic(), 100)),
        (
            "warmup:100,initial_scale=8+dynamic:growth_interval=50",
            Warmup(scaler.Dynamic(growth_interval=50), 100, initial_scale=8),
        ),
        ("bounded:1,2**20+pytorch", Bounded(scaler.presets.pytorch(), 1, 2**20)),
        ("bounded:1,max_scale=1e+6+static:8", Bounded(scaler.Static(8), 1, 1e6)),
        ("bounded:max_scale=4,min_scale=1+none", Bounded(scaler.NoScaling(), 1, 4)),
        ("rising_floor+dynamic", RisingFloor(scaler.Dynamic())),
        ("rising_floor:10=8,200=2**10+headroom", RisingFloor(scaler.Headroom(), {10: 8, 200: 1024})),
        (
            "bounded:1,64+rising_floor:3=2+warmup:5+smooth",
            Bounded(RisingFloor(Warmup(scaler.Smooth(), 5), {3: 2}), 1, 64),
        ),
        ("spike_guard+dynamic", scaler.SpikeGuard(scaler.Dynamic())),
        (
            "spike_guard:by_tensor=clip,norm=False+none",
            scaler.SpikeGuard(scaler.NoScaling(), norm=False, by_tensor="clip"),
        ),
        ("spike_guard:by_tensor=None+none", scaler.SpikeGuard(scaler.NoScaling())),
        (
            "spike_guard:factor=9,window=50,loss=False+warmup:5+none",
            scaler.SpikeGuard(Warmup(scaler.NoScaling(), 5), factor=9, window=50, loss=False),
        ),
        (
            "static:1024+then:500+warmup:9+dynamic+then:900+headroom:memory=3",
            Scheduled({0: scaler.Static(1024), 500: Warmup(scaler.Dynamic(), 9), 900: scaler.Headroom(memory=3)}),
        ),
    ],
)
def test_texts_and_their_strategies(text, strategy):
    assert parse_strategy(text) == strategy


REFUSED = {
    "no strategy": ["", "foo", "zzz", "deepspeed_stuck", "none:1", "optax_apply_if_finite:x=1"],
    "nearly one": ["Dynamic", "headrom", "pytorh", "DelayedAmax", "log-normal:log_max=2", "Dynamic:growth_interval=3"],
    "no scale": ["static", "static:", "static:nan", "static:0", "static:-8", "static:2**127", "static:1e400"],
    "no number": ["static:abc", "static:'8'", "static:'abc'", "static:[1]", "static:None", "static:True"],
    "no sum of numbers": ["static:1+2j", "static:(-8)**0.5", "static:2**", "static:**2"],
    "too large to compute": ["static:2**2000", "static:9**9**9", "dynamic:max_scale=2**2000"],
    "no argument": ["dynamic:growth=2", "dynamic:_=1", "dynamic:200", "dynamic:growth_intervall=3"],
    "no argument of the preset": ["pytorch:hysteresis=2", "tf_contrib:initial_scale=8"],
    "no value": ["dynamic:growth_interval", "dynamic:growth_interval=", "dynamic:growth_interval=3,growth_interval=4"],
    "no value of the argument": [
        *("dynamic:growth_interval=0", "dynamic:growth_interval=1.5", "dynamic:growth_interval=2**64"),
        *("dynamic:min_scale=4,max_scale=2", "dynamic:hysteresis=x", "dynamic:consecutive_hysteresis=7"),
        *("pytorch:growth_factor=1", "headroom:format=float17", "headroom:memory=abc", "delayed_amax:algorithm=median"),
    ],
    "around nothing": ["warmup", "warmup:100", "warmup:100+", "Warmup:5", "+dynamic"],
    "around no strategy": ["warmup:5+dynamik", "warm_up:5+dynamic", "dynamic+headroom"],
    "around with bad arguments": [
        *("warmup+dynamic", "warmup:0+dynamic", "warmup:5,5,5+dynamic", "warmup:5,steps=6+dynamic"),
        *("warmup:initial_scale=2,5+dynamic", "warmup:strategy=5+dynamic", "bounded:4,2+dynamic", "bounded:4+dynamic"),
    ],
    "rising floors": [
        *("rising_floor:8+dynamic", "rising_floor:x=8+dynamic", "rising_floor:1.5=8+dynamic"),
        "rising_floor:1=8,1=16+dynamic",
    ],
    "then": [
        *("then:5+dynamic", "dynamic+then:5", "dynamic+then:0+none", "dynamic+then:7+none+then:7+none"),
        *("dynamic+then:x+none", "dynamic+then:1.5+none", "dynamic+then:2**40+none"),
        "histogram:edge=4+then:5+histogram:edge=8",
    ],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_texts_are_named(kind, snapshot):
    said = {}
    for text in REFUSED[kind]:
        with pytest.raises(scaler.InvalidArgument) as caught:
            parse_strategy(text)
        said[text] = str(caught.value)
        assert "\n" not in said[text]
    assert said == snapshot


_RESEARCH = {
    "headroom": scaler.Headroom,
    "histogram": scaler.Histogram,
    "delayed_amax": scaler.DelayedAmax,
    "log_normal": scaler.LogNormal,
    "smooth": scaler.Smooth,
}
_PRESETS = {name: getattr(scaler.presets, name) for name in scaler.presets.__all__ if not name.endswith("_stuck")}


@pytest.mark.parametrize(("named", "make"), [*_RESEARCH.items(), *_PRESETS.items()])
def test_any_value_of_a_named_strategy_is_taken_or_named(named, make):
    required = {"initial_scale": "8", "growth_interval": "3"} if named == "tf_contrib" else {}
    for name in inspect.signature(make).parameters:
        for value in ("None", "'x'", "[1]", "True", "1+2j", "-1", "0", "1e999", "2**64"):
            said = name
            try:
                parse_strategy(f"{named}:" + ",".join(f"{n}={v}" for n, v in {**required, name: value}.items()))
            except scaler.InvalidArgument as error:
                said = str(error).partition(": ")[2]
            assert name in said, (name, value, said)


_PIECES = ["static:", "fairseq:", "dynamic:", "none", "warmup:", "rising_floor:", "growth_interval=", "min_scale="]
_PIECES += ["+", "+then:", "2", "0.5", "1e9", "**", "-", ",", "=", "(", "'"]


@pytest.mark.slow
@given(text=st.lists(st.sampled_from(_PIECES), max_size=6).map("".join) | st.text(max_size=12))
@example("static:\x00")
@example("dynamic:min_scale=(((((")
def test_any_text_is_a_strategy_or_an_invalid_argument(text):
    try:
        strategy = parse_strategy(text)
    except scaler.InvalidArgument:
        return
    assert isinstance(strategy, scaler.Strategy)
