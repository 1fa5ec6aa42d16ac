"""Guards strategies written as text: what they mean, and that any other text is named in one kind of error."""

import inspect
import subprocess
import sys

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
        ("static:2**10", scaler.Static(1024.0)),
        ("static:2**-126", scaler.Static(2.0**-126)),
        ("static:2**126", scaler.Static(2.0**126)),
        ("static:1e3", scaler.Static(1000.0)),
        ("static:0.5", scaler.Static(0.5)),
        ("dynamic", scaler.Dynamic()),
        (
            "dynamic:growth_interval=200,initial_scale=65536",
            scaler.Dynamic(65536, growth_interval=200),
        ),
        ("dynamic:min_scale=2**-20", scaler.Dynamic(min_scale=2.0**-20)),
        ("dynamic:initial_scale=2**20,max_scale=2**20", scaler.Dynamic(2.0**20, max_scale=2.0**20)),
        (
            "dynamic:growth_factor=4,backoff_factor=0.25,hysteresis=2",
            scaler.Dynamic(growth_factor=4, backoff_factor=0.25, hysteresis=2),
        ),
        ("dynamic:consecutive_hysteresis=True", scaler.Dynamic(consecutive_hysteresis=True)),
        ("headroom:headroom=2,format=bfloat16,memory=7", scaler.Headroom(headroom=2, format="bfloat16", memory=7)),
        ("histogram:dead_band=0.5,edge=2**12", scaler.Histogram(dead_band=0.5, edge=4096)),
        ("delayed_amax:algorithm=most_recent", scaler.DelayedAmax(algorithm="most_recent")),
        ("delayed_amax:format='float8_e5m2'", scaler.DelayedAmax(format="float8_e5m2")),
        ("log_normal:repaired=False", scaler.LogNormal(repaired=False)),
        ("smooth:initial_scale=1,search=True", scaler.Smooth(1.0, search=True)),
        ("pytorch", scaler.presets.pytorch()),
        ("deepspeed:hysteresis=3,min_scale=2**-4", scaler.presets.deepspeed(hysteresis=3, min_scale=2.0**-4)),
        ("fairseq:tolerance=0.4,threshold=None", scaler.presets.fairseq(tolerance=0.4)),
        ("tf_contrib:initial_scale=8,growth_interval=5", scaler.presets.tf_contrib(8, growth_interval=5)),
        ("optax_apply_if_finite", scaler.NoScaling()),
        ("static:1e+3", scaler.Static(1000.0)),
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
            Scheduled(
                {
                    0: scaler.Static(1024),
                    500: Warmup(scaler.Dynamic(), 9),
                    900: scaler.Headroom(memory=3),
                }
            ),
        ),
    ],
)
def test_texts_and_their_strategies(text, strategy):
    assert parse_strategy(text) == strategy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "none, static:SCALE"),
        ("foo", "none, static:SCALE"),
        ("Dynamic", "none, static:SCALE"),
        ("static", "static:1024"),
        ("static:", "static:1024"),
        ("none:1", "none, static:SCALE"),
        ("static:abc", "'abc' is not a number"),
        ("static:'8'", "'8'"),
        ("static:'abc'", "'abc'"),
        ("static:[1]", "[1]"),
        ("static:None", "None"),
        ("static:1+2j", "1+2j"),
        ("static:(-8)**0.5", "(-8)**0.5"),
        ("static:True", "True"),
        ("static:nan", "nan"),
        ("static:0", "loss_scale=0"),
        ("static:-8", "loss_scale=-8"),
        ("static:2**127", "2^126"),
        ("static:2**2000", "2**2000"),
        ("static:9**9**9", "9**9**9"),
        ("static:1e400", "inf"),
        ("static:2**", "2**"),
        ("static:**2", "**2"),
        ("dynamic:growth=2", "'growth=2': expected one of initial_scale"),
        ("dynamic:growth_interval", "with =VALUE"),
        ("dynamic:growth_interval=", "growth_interval="),
        ("dynamic:growth_interval=0", "growth_interval=0"),
        ("dynamic:growth_interval=1.5", "growth_interval=1.5"),
        ("dynamic:growth_interval=2**64", "growth_interval=18446744073709551616"),
        ("dynamic:min_scale=4,max_scale=2", "min_scale"),
        ("dynamic:max_scale=2**2000", "max_scale"),
        ("dynamic:hysteresis=x", "'x' is not a number"),
        ("dynamic:_=1", "'_=1': expected one of"),
        ("dynamic:consecutive_hysteresis=7", "consecutive_hysteresis"),
        ("pytorch:hysteresis=2", "'hysteresis=2': expected one of initial_scale, growth_factor"),
        ("pytorch:growth_factor=1", "growth_factor=1"),
        ("tf_contrib:initial_scale=8", "growth_interval has no default"),
        ("deepspeed_stuck", "expected none, static:SCALE"),
        ("optax_apply_if_finite:x=1", "no arguments"),
        ("headrom", "did you mean 'headroom'?"),
        ("DelayedAmax", "did you mean 'delayed_amax'?"),
        ("log-normal:log_max=2", "did you mean 'log_normal'?"),
        ("Dynamic:growth_interval=3", "did you mean 'dynamic'?"),
        ("pytorh", "did you mean 'pytorch'?"),
        ("zzz", "'zzz': expected none"),
        ("static", "'static': expected none"),
        ("dynamic:growth_intervall=3", "did you mean 'growth_interval'?"),
        ("dynamic:growth_interval=3,growth_interval=4", "growth_interval is given twice"),
        ("headroom:format=float17", "expected one of float32, float16"),
        ("delayed_amax:algorithm=median", "expected one of max, most_recent"),
        ("headroom:memory=abc", "'abc' is not a number"),
        ("dynamic:200", "'200': expected one of initial_scale"),
        ("warmup", "warmup goes around another strategy: add one, as in warmup+dynamic"),
        ("warmup:100", "as in warmup:100+dynamic"),
        ("warmup:100+", "as in warmup:100+dynamic"),
        ("warmup+dynamic", "warmup: steps has no default"),
        ("warmup:0+dynamic", "warmup: steps=0"),
        ("warmup:5,5,5+dynamic", "'5': expected one of steps, initial_scale"),
        ("warmup:5,steps=6+dynamic", "steps is given twice"),
        ("warmup:initial_scale=2,5+dynamic", "initial_scale is given twice"),
        ("warmup:strategy=5+dynamic", "'strategy=5': expected one of steps"),
        ("bounded:4,2+dynamic", "bounded: min_scale=4"),
        ("bounded:4+dynamic", "max_scale has no default"),
        ("rising_floor:8+dynamic", "expected STEP=FLOOR"),
        ("rising_floor:x=8+dynamic", "'x' is not a number"),
        ("rising_floor:1.5=8+dynamic", "steps, different integers"),
        ("rising_floor:1=8,1=16+dynamic", "steps, different integers"),
        ("dynamic+headroom", "'dynamic' does not go around another strategy: expected one of bounded"),
        ("warm_up:5+dynamic", "did you mean 'warmup'? 'warm_up:5' does not go around"),
        ("Warmup:5", "did you mean 'warmup'?"),
        ("warmup:5+dynamik", "did you mean 'dynamic'?"),
        ("+dynamic", "'' does not go around"),
        ("then:5+dynamic", "then:STEP goes between two strategies"),
        ("dynamic+then:5", "then:STEP goes between two strategies"),
        ("dynamic+then:0+none", "'then:0': expected then:STEP"),
        ("dynamic+then:7+none+then:7+none", "'then:7': expected then:STEP with increasing integers"),
        ("dynamic+then:x+none", "'x' is not a number"),
        ("dynamic+then:1.5+none", "'then:1.5': expected then:STEP"),
        ("dynamic+then:2**40+none", "different integers in [0, 2^31)"),
        ("histogram:edge=4+then:5+histogram:edge=8", "one event has one histogram"),
    ],
)
def test_other_texts_are_named(text, named):
    with pytest.raises(scaler.InvalidArgument) as caught:
        parse_strategy(text)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.exhaustive
def test_an_enormous_power_is_refused_and_not_computed():
    """In a process of its own: an integer power cannot be interrupted."""
    code = (
        "import scaler; from loops.run.strategy_text import parse_strategy\n"
        "try: parse_strategy('static:9**999999999')\n"
        "except scaler.InvalidArgument as error: print('refused', error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.startswith("refused")


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


_PIECES = [
    "static:",
    "fairseq:",
    "dynamic:",
    "none",
    "warmup:",
    "rising_floor:",
    "+",
    "+then:",
    "growth_interval=",
    "min_scale=",
    "2",
    "0.5",
    "**",
    "-",
    ",",
    "=",
    "1e9",
    "(",
    "'",
]


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
