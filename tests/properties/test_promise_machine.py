"""Guards all eight lines of the promise at once: random mixtures of faults on a small model, checked after every rule.

Three models, each compiled once and set back by assignment: float16 with masters under Adam, and under momentum with
windows of three micro-batches; and float32 beside a twin that never heard of scaling, equal to it in every bit.

A few hundred rules by default; `make gpu` runs two thousand, `make promise` a hundred thousand.
"""

import collections
import copy
import dataclasses
import tempfile

import hypothesis
import keras
import numpy as np
import promise_reference as reference
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rigs import raw

import loops
import scaler

FIRST, LOW, HIGH = 2.0**10, 2.0**-3, 2.0**17
MOMENTUM = 0.875
CLIP_NORM = 4.0
PATIENCE = 4
RATES = (0.0, 0.0078125, 0.125)
FAULTS = ("none", "overflow", "nan loss", "forward", "1e20", "nan data", "underflow")
TALLY = collections.Counter()


class Track(keras.layers.Layer):
    """What BatchNorm and a seed generator do to a model: a moving mean, and a number drawn at each batch."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
        self.draws = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="draws")

    def call(self, x):
        mean = tf.reduce_mean(tf.cast(x, tf.float32), axis=0)
        self.mean.assign(tf.cast(0.5 * tf.cast(self.mean, tf.float32) + 0.5 * mean, self.mean.dtype))
        self.draws.assign(self.draws + 1)
        return x


def weighted_error(y, prediction, importance):
    residual = tf.cast(prediction, tf.float32) - y
    return tf.reduce_mean(importance[:, None] * tf.square(residual))


@dataclasses.dataclass(frozen=True)
class Setup:
    kind: str
    optimizer: str
    window: int
    hysteresis: int = 1
    clip: bool = False
    scaled: bool = True

    def make_optimizer(self):
        if self.optimizer == "Adam":
            return keras.optimizers.Adam(RATES[1])
        return keras.optimizers.SGD(RATES[1], momentum=MOMENTUM)


@dataclasses.dataclass(frozen=True)
class Seen:
    """The values of all variables of a rig after a step, and what its scaler says of itself."""

    variables: list
    loss_scale: np.float32
    counters: list
    reading: np.ndarray
    slots: int

    @property
    def model(self):
        """Kernel, bias, moving mean and number of draws."""
        return self.variables[:4]

    @property
    def optimizer(self):
        """Count of steps, learning rate and slots."""
        return self.variables[4 : 4 + self.slots]

    @property
    def masters(self):
        return self.variables[4 + self.slots : 6 + self.slots]

    @property
    def kept(self):
        """Masters and slots: what nothing but an applied step moves."""
        return [*self.optimizer, *self.masters]


class Rig:
    """A compiled train step, all of its variables, and their values at the start."""

    def __init__(self, setup):
        self.setup = setup
        keras.utils.set_random_seed(11)
        layers = [keras.Input([3], dtype=setup.kind), keras.layers.Dense(2, dtype=setup.kind), Track(dtype=setup.kind)]
        self.model, self.optimizer = keras.Sequential(layers), setup.make_optimizer()
        self.interval = tf.Variable(3)
        bounds = {"min_scale": LOW, "max_scale": HIGH, "hysteresis": setup.hysteresis}
        strategy = scaler.Dynamic(FIRST, growth_interval=self.interval, **bounds)
        stuck = scaler.StuckPolicy(consecutive_skips=PATIENCE, skip_rate=None)
        self.scaler = scaler.LossScaler(strategy if setup.scaled else scaler.NoScaling(), stuck=stuck)
        self.step = loops.TrainStep(
            self.model,
            weighted_error,
            self.optimizer,
            loss_scaler=self.scaler,
            accumulate=setup.window,
            clip_norm=CLIP_NORM if setup.clip else None,
        )
        self.call = tf.function(self.step)
        self.call.get_concrete_function(batch(0, "none", setup.kind))
        masters = self.step.masters.weights if self.step.masters else self.model.trainable_variables[:2]
        window = self.step.window.variables if self.step.window else ()
        groups = (self.model.variables, self.optimizer.variables, masters, self.scaler.variables, window)
        variables = [v.value if isinstance(v, keras.Variable) else v for group in groups for v in group]
        self.variables = [*variables, self.interval]
        self.read_all = tf.function(self.everything, autograph=False)
        self.start = self.read().variables
        self.checkpoint = tf.train.Checkpoint(variables=self.variables)

    def everything(self):
        values = [tf.identity(variable) for variable in self.variables]
        return values, self.scaler.loss_scale, list(self.scaler.counters), scaler.authoring.reading(self.scaler)

    def read(self):
        """Everything there is, read at once."""
        return Seen(*tf.nest.map_structure(lambda value: value.numpy(), self.read_all()), len(self.optimizer.variables))

    def assign(self, values):
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)


def batch(seed, fault, kind):
    """Two examples: inputs [2, 3], targets [2, 2], importance [2], with the fault in one of them."""
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(2, 3)).astype(np.float16), random.normal(size=(2, 2)).astype(np.float32)
    x, importance = x.astype(np.float32), np.ones(2, np.float32)
    place = seed % 2
    if fault == "forward":
        x[place] = 1e6 if kind == "float16" else 3e38
    elif fault == "nan data":
        x[place, seed % 3] = np.nan
    elif fault != "none":
        importance[place] = {"overflow": 2.0**20, "nan loss": np.nan, "1e20": 1e20, "underflow": 2.0**-40}[fault]
    return tf.cast(x, kind), tf.constant(y), tf.constant(importance)


SETUPS = {
    "adam, hysteresis": Setup("float16", "Adam", 1, hysteresis=2),
    "momentum, window of 3, clipped": Setup("float16", "SGD", 3, clip=True),
    "float32 and its twin": Setup("float32", "SGD", 1),
}
RIGS = {}


def rigs(name):
    """The model and its twin, made when first asked for."""
    if name not in RIGS:
        setup = SETUPS[name]
        twin = Rig(dataclasses.replace(setup, scaled=False)) if setup.kind == "float32" else None
        RIGS[name] = Rig(setup), twin
    return RIGS[name]


@dataclasses.dataclass
class Expected:
    """What the reference knows beside the model's own variables."""

    scale: reference.Scale
    rate: float
    interval: int
    micro: int = 0
    sums: list | None = None
    finite: bool | None = True
    loss_finite: bool = True
    draws: int = 0
    state: list | None = None


class Promise(RuleBasedStateMachine):
    """One run of training, with everything that may befall it."""

    @initialize(name=st.sampled_from(sorted(SETUPS)))
    def begin(self, name):
        self.rig, self.twin = rigs(name)
        for rig in self.both():
            rig.assign(rig.start)
        self.seen = self.look()
        self.setup = self.rig.setup
        scale = reference.Scale(FIRST, LOW, HIGH, self.setup.hysteresis)
        self.expected = Expected(scale, RATES[1], 3)
        self.saved = None
        self.log = []

    def both(self):
        return [self.rig, self.twin] if self.twin else [self.rig]

    def look(self):
        return [rig.read() for rig in self.both()]

    @rule(seed=st.integers(0, 7), fault=st.sampled_from(("none",) * 6 + FAULTS))
    def train(self, seed, fault):
        self.act(("train", seed, fault))

    @rule(seed=st.integers(0, 7), count=st.integers(2, 5))
    def train_on(self, seed, count):
        """Good batches in a row, for the scale to grow."""
        for number in range(count):
            self.act(("train", (seed + number) % 8, "none"))

    @rule(seed=st.integers(0, 7), fault=st.sampled_from(FAULTS[1:]), count=st.integers(2, 5))
    def train_badly(self, seed, fault, count):
        for number in range(count):
            self.act(("train", (seed + number) % 8, fault))

    @rule(interval=st.integers(1, 4))
    def change_interval(self, interval):
        self.act(("interval", interval))

    @rule(rate=st.sampled_from(RATES))
    def change_rate(self, rate):
        self.act(("rate", rate))

    @rule(seed=st.integers(0, 3), size=st.sampled_from([0.0, 0.25, 4.0]), part=st.booleans())
    def set_weights(self, seed, size, part):
        self.act(("weights", seed, size, part))

    @rule(disk=st.sampled_from([False] * 7 + [True]))
    def save(self, disk):
        if disk:
            with tempfile.TemporaryDirectory() as folder:
                path = self.rig.checkpoint.write(f"{folder}/ckpt")
                for variable in self.rig.variables:
                    variable.assign(tf.ones_like(variable))
                self.rig.checkpoint.read(path).assert_consumed()
            assert raw(self.rig.read().variables) == raw(self.seen[0].variables)
        self.saved = self.seen, copy.deepcopy(self.expected)
        self.log = []

    @rule()
    def restore(self):
        """Back to what was saved, and once more through what came after: every bit again."""
        if self.saved is None:
            return
        seen, expected = self.saved
        for rig, saved in zip(self.both(), seen, strict=True):
            rig.assign(saved.variables)
        self.seen = self.look()
        for now, saved in zip(self.seen, seen, strict=True):
            assert raw(now.variables) == raw(saved.variables)
        self.expected = copy.deepcopy(expected)
        again, self.log = self.log[:6], []
        for action, bits in again:
            self.act(action)
            assert self.log[-1][1] == bits, f"{action} did something else after a restore"

    def act(self, action):
        """Does one thing, checks it and remembers what it led to."""
        kind, *arguments = action
        getattr(self, f"do_{kind}")(*arguments)
        TALLY["actions"] += 1
        if kind != "train":
            self.seen = self.look()
        self.check_everywhere()
        self.log.append((action, [bits for seen in self.seen for bits in raw(seen.variables)]))

    def do_interval(self, interval):
        self.expected.interval = interval
        self.rig.interval.assign(interval)

    def do_rate(self, rate):
        self.expected.rate = rate
        for rig in self.both():
            rig.optimizer.learning_rate.assign(rate)

    def do_weights(self, seed, size, part):
        random = np.random.default_rng(seed)
        kernel, bias = (random.normal(size=shape) * size for shape in ((3, 2), (2,)))
        for rig in self.both():
            layer = rig.model.layers[0]
            old = layer.get_weights()
            # Assigning a part leaves the masters of the rest as they are.
            new = [np.where([True, False], kernel, old[0]) if part else kernel, old[1] if part else bias]
            layer.set_weights([value.astype(weight.dtype) for value, weight in zip(new, old, strict=True)])

    def do_train(self, seed, fault):
        setup, want, rig = self.setup, self.expected, self.rig
        data = batch(seed, fault, setup.kind)
        before = self.seen[0]
        kernel, bias, mean, draws = before.model
        if want.micro == 0:
            want.sums, want.finite, want.loss_finite, want.state = None, True, True, [mean, draws]
        arrays = [value.numpy() for value in data]
        micro = reference.micro_batch(kernel, bias, *arrays, want.scale.scale, 1 / setup.window, setup.kind)
        want.finite = False if False in (want.finite, micro.finite) else None if micro.finite is None else want.finite
        more = [micro.kernel, micro.bias]
        want.sums = [reference.plus(*pair) for pair in zip(want.sums, more, strict=True)] if want.sums else more

        outcome = {name: value.numpy() for name, value in rig.call(data).items()}
        if self.twin:
            assert bool(self.twin.call(data)["applied"]) == bool(outcome["applied"])
        self.seen = self.look()
        now = self.seen[0]
        want.micro = (want.micro + 1) % setup.window
        want.loss_finite &= bool(np.isfinite(outcome["loss"]))
        assert outcome["loss_scale"] == want.scale.scale
        assert bool(outcome["attempted"]) == (want.micro == 0)
        if want.micro:
            assert not outcome["applied"]
            # A micro-batch moves the model's own state at most.
            assert raw(now.model[:2], now.kept) == raw(before.model[:2], before.kept)
            return

        applied = bool(outcome["applied"])
        self.decided(applied, fault)
        TALLY["bad data"] += not applied and not want.loss_finite
        want.scale.step(applied, want.interval, want.loss_finite)
        if not applied:
            assert raw(now.model, now.kept) == raw(before.model[:2], want.state, before.kept)
            return
        assert now.model[3] == want.state[1] + setup.window
        if setup.window == 1:
            self.moved_mean(mean, micro.output, now.model[2])
        grads = reference.clipped(want.sums, CLIP_NORM) if setup.clip else want.sums
        starts = [reference.master_before(m, v) for m, v in zip(before.masters, (kernel, bias), strict=True)]
        self.updated(starts, before.optimizer, grads, now)

    def decided(self, applied, fault):
        want = self.expected
        finite = want.finite
        if finite:
            finite = reference.norm_is_finite(want.sums)
        TALLY[f"{'applied' if applied else 'skipped'}, {fault}"] += 1
        TALLY["rounding decides"] += finite is None
        if finite is not None:
            assert applied == finite, f"{'applied' if applied else 'skipped'}, though the gradients are {want.sums}"

    def moved_mean(self, before, output, after):
        value = 0.5 * before.astype(np.float64) + 0.5 * output.value.mean(axis=0)
        kind = reference.KINDS[self.setup.kind]
        size = np.abs(before.astype(np.float64)) + output.most.mean(axis=0)
        error = 0.5 * output.error.mean(axis=0) + (kind.roundoff + 8 * reference.SINGLE) * size + kind.least
        reference.Bounded(value, error).check(after, "moving mean")

    def updated(self, starts, slots, grads, now):
        rate, variables = float(np.float32(self.expected.rate)), now.optimizer
        assert variables[0] == slots[0] + 1
        wide = [start.astype(np.float64) for start in starts]
        old = [slot.astype(np.float64) for slot in slots[2:]]
        for at, name in enumerate(("kernel", "bias")):
            if self.setup.optimizer == "Adam":
                first, second = 2 * at, 2 * at + 1
                m, v, weight = reference.adam_step(
                    wide[at], old[first], old[second], grads[at], rate, int(variables[0])
                )
                m.check(variables[2 + first], f"first moment of {name}")
                v.check(variables[2 + second], f"second moment of {name}")
            else:
                slot, weight = reference.momentum_step(wide[at], old[at], grads[at], rate, MOMENTUM)
                slot.check(variables[2 + at], f"momentum of {name}")
            weight.check(now.masters[at], f"master of {name}")
            model = now.model[at]
            assert raw([model]) == raw([reference.rounded(now.masters[at], model.dtype)])

    def check_everywhere(self):
        for seen in self.seen:
            values = [value.astype(np.float64) for value in seen.variables if value.dtype.kind not in "iub"]
            assert all(np.isfinite(value).all() for value in values)
        now, want = self.seen[0], self.expected.scale
        assert LOW <= now.loss_scale <= HIGH
        assert now.loss_scale == want.scale
        assert now.counters == [want.attempted, want.applied, want.attempted - want.applied, want.row]
        assert now.optimizer[0] == want.applied
        if self.twin:
            assert raw(now.model, now.kept) == raw(self.seen[1].model, self.seen[1].kept)
        if want.row < PATIENCE:
            self.rig.scaler.check(now.reading)
        elif want.row <= PATIENCE + 1:  # The sentence is costly, and the same from then on.
            with pytest.raises(scaler.StuckError, match=f"{want.row} steps in a row.*'sequential.*/(kernel|bias)'"):
                self.rig.scaler.check(now.reading)

    @invariant()
    def nothing_is_left_unchecked(self):
        TALLY["rules"] += 1


def run(examples, steps):
    settings = hypothesis.settings(
        hypothesis.settings(),
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    TALLY.clear()
    run_state_machine_as_test(Promise, settings=settings)
    print(dict(TALLY))


@pytest.mark.dear("compiles four kinds of steps and drives each through a hundred faults")
def test_a_few_hundred_rules():
    run(19, 25)
    # The mixture holds what it is about, and rounding decides rarely.
    assert TALLY["rules"] >= 300
    assert 20 <= TALLY["bad data"] <= sum(TALLY[f"skipped, {fault}"] for fault in FAULTS) - 20
    assert TALLY["rounding decides"] <= 0.05 * TALLY["actions"]
    for fault in FAULTS:
        assert TALLY[f"{'applied' if fault in ('none', 'underflow') else 'skipped'}, {fault}"], fault


@pytest.mark.exhaustive
@pytest.mark.parametrize("rules", [100, 2_000, 100_000])
def test_many_rules(rules):
    run(rules // 32, 50)
    assert TALLY["rules"] >= rules
