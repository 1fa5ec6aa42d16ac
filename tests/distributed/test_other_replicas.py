"""Guards that a run goes on with another number of replicas where that is meant: same batches, scale and weights."""

import io
import shutil

import keras
import models
import numpy as np
import pytest
import replica_cases as cases
import rich.console
import tensorflow as tf

import loops
import scaler
from halfstep.commands.read_runs import text_of_checkpoint
from loops.loop.state import regrouped
from loops.loop.state.folder import describe
from loops.loop.state.variables import layout

STOP, END = 5, 9


def examples(bad=None, target=np.inf):
    """Sixteen batches of eight, each with its number in the last column of the targets; `bad` has another target."""
    random = np.random.default_rng(5)
    x = random.normal(size=(16, 8, 4)).astype(np.float32)
    numbers = np.broadcast_to(np.arange(16, dtype=np.float32)[:, None, None], (16, 8, 1))
    y = np.concatenate([random.normal(size=(16, 8, 1)).astype(np.float32), numbers], axis=-1)
    if bad is not None:
        y[bad, -1, 0] = target  # In the last replica's share.
    return x, y


def in_batches(size, *bad):
    """The examples in the order of their batches, which a seed shuffles."""
    keras.utils.set_random_seed(7)  # As the models do.
    shuffled = tf.data.Dataset.from_tensor_slices(examples(*bad)).shuffle(16, seed=3)
    return shuffled.unbatch().batch(size, drop_remainder=True).prefetch(2)


def number_at(step):
    """The number of the batch that a step takes."""
    return int(next(y for at, (_, y) in enumerate(in_batches(8).as_numpy_iterator(), 1) if at == step)[0, 1])


def loss_fn(y, prediction):
    return models.squared_error(y[:, :1], prediction), {"number": tf.reduce_mean(y[:, 1])}


class Run:
    """One run with its outputs by step; `replicas` of 0 means none of a strategy."""

    def __init__(
        self,
        count,
        folder=None,
        changed=(),
        *,
        size=8,
        data=None,
        model=models.one_layer,
        guards=False,
        actions=(),
        **step,
    ):
        keras.utils.clear_session()
        strategy = cases.mirrored(count) if count else None
        with strategy.scope() if strategy else tf.init_scope():
            self.model, self.optimizer = model(), keras.optimizers.SGD(0.1, momentum=0.5)
            scaling = scaler.Dynamic(2.0**10, growth_interval=3)
            self.loss_scaler = scaler.LossScaler(scaler.SpikeGuard(scaling, window=3, loss=True) if guards else scaling)
            self.step = loops.TrainStep(self.model, loss_fn, self.optimizer, loss_scaler=self.loss_scaler, **step)
        self.outputs = {}
        saves = [loops.Checkpoint(folder, every=100, resume=True, changed=changed)] if folder else []
        self.loop = loops.Loop(
            self.step,
            in_batches(size) if data is None else data,
            steps_per_call=1,
            strategy=strategy,
            actions=[self._collect, *actions, *saves],
        )

    def _collect(self, visit):
        self.outputs[visit.first] = {name: np.asarray(value)[0] for name, value in visit.outputs.items()}

    def go(self, steps):
        self.loop.run(steps)
        return self

    def said(self, name, first=STOP + 1):
        return [one[name] for step, one in self.outputs.items() if step >= first]

    def weights(self):
        """Weights, masters and slots of each replica."""
        masters = self.step.masters.weights if self.step.masters else []
        return cases.components([*self.model.trainable_variables, *masters, *self.optimizer.variables])


def assert_like(run, whole, first=STOP + 1):
    """The batches, the decisions and the scales to the bit; losses and weights to rounding."""
    for name in ("number", "attempted", "applied", "loss_scale", "cause"):
        assert run.said(name, first) == whole.said(name, first)
    assert run.loop.counters == whole.loop.counters
    np.testing.assert_allclose(run.said("loss", first), whole.said("loss", first), rtol=1e-4)
    for ours, theirs in zip(run.weights(), whole.weights(), strict=True):
        for part in ours:
            np.testing.assert_allclose(part, theirs[0], rtol=1e-3, atol=1e-5)


def stopped_and_whole(run, folder):
    """Takes a copy of the run's folder after `STOP` steps, and lets the run go on."""
    run.go(STOP)
    return shutil.copytree(folder, folder.with_name("stopped")), run.go(END)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The copy, and the run on two replicas, that several tests start from."""
    folder = tmp_path_factory.mktemp("started") / "whole"
    return stopped_and_whole(Run(2, folder), folder)


def test_it_goes_on_with_the_same_batches_and_nearly_the_same_bits(shared, tmp_path):
    stopped, whole = shared
    folder = shutil.copytree(stopped, tmp_path / "folder")
    console = rich.console.Console(file=io.StringIO(), width=200)
    run = Run(0, folder, ["replicas"], actions=[loops.Progress(console=console)]).go(END)
    assert_like(run, whole)
    said = "replicas was 2 and is 1, so that its bits are no longer those of the earlier machine"
    assert run.loop.resumed.changes == (said,)
    assert f"resumed from step {STOP}; {said}" in console.file.getvalue()
    assert f"from step {STOP} on: {said}" in text_of_checkpoint(describe(folder))


def test_components_of_every_kind_on_another_number_of_replicas(tmp_path):
    """Statistics are averaged, an open window's sums are added up, of integers the first counts, and weights stay."""
    on_read, add = tf.VariableSynchronization.ON_READ, tf.VariableAggregation

    def made(count):
        with cases.mirrored(count).scope():
            kept = {"synchronization": on_read, "dtype": tf.float16, "aggregation": add.MEAN}
            return [
                tf.Variable([0.0, 0.0], name="statistics", **kept),
                tf.Variable(0.0, name="window", synchronization=on_read, aggregation=add.SUM),
                tf.Variable(0, name="seed", synchronization=on_read, aggregation=add.ONLY_FIRST_REPLICA),
                tf.Variable([7.0, 8.0], name="weight"),
            ]

    def groups(variables):
        return {"all": [part for variable in variables for part in variable.values]}

    before, after = made(4), made(2)
    moving = np.float16([[1.0, 1e4], [2.0, 5e4], [3.0, 6e4], [2.001, 6e4]])
    cases.assign(before, [moving, [1.0, 2.0, 4.0, 8.0], range(5, 9), [[7.0, 8.0]] * 4])
    path = tf.train.Checkpoint(**groups(before)).write(str(tmp_path / "four"))
    regrouped.restore(path, layout(groups(before)), groups(after))
    mean = np.mean(moving, axis=0, dtype=np.float64).astype(np.float16)
    wanted = [[mean, mean], [15.0, 0.0], [5, 5], [[7.0, 8.0]] * 2]
    for ours, theirs in zip(cases.components(after), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def normalizing():
    """In float16, with BatchNorm and masters."""
    keras.utils.set_random_seed(7)
    norm = keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False, dtype="float16", name="norm")
    return keras.Sequential(
        [keras.Input([4], dtype="float16"), norm, keras.layers.Dense(1, dtype="float16", name="dense")]
    )


def half(count, folder, changed=()):
    """The batch right after the change overflows."""
    return Run(count, folder, changed, data=in_batches(8, number_at(STOP + 1), 1e10), model=normalizing)


def statistics(run, name="moving"):
    return cases.components([one for one in run.model.non_trainable_variables if name in one.path])


@pytest.mark.dear("a run on one replica and one on two, each traced")
def test_scale_masters_and_statistics_in_float16_with_a_skip_right_after(tmp_path):
    then, now = 1, 2
    before = half(then, tmp_path).go(STOP)
    run = half(now, tmp_path, ["replicas"]).go(STOP + 1)
    # The skipped step moved nothing: this is what the checkpoint had.
    assert run.said("applied") == [False]
    assert run.said("loss_scale") == [2.0**11]
    assert float(run.loss_scaler.loss_scale) == 2.0**10
    for ours, theirs in zip(run.weights(), before.weights(), strict=True):
        assert {part.tobytes() for part in ours} == {part.tobytes() for part in theirs}
    for ours, (theirs,) in zip(statistics(run), statistics(before), strict=True):
        assert [part.tobytes() for part in ours] == [theirs.tobytes()] * now
    # Each replica's go on with its own share: by hand, in float32, with the momentum of 0.5.
    (restored,) = statistics(run, "moving_mean")
    (parts,) = statistics(run.go(STOP + 2), "moving_mean")
    shares = np.split(examples()[0][number_at(STOP + 2)], now)
    for share, before_it, part in zip(shares, restored, parts, strict=True):
        np.testing.assert_allclose(part, 0.5 * before_it + 0.5 * share.mean(axis=0), atol=2e-3)


@pytest.mark.slow
def test_an_open_window_is_added_up(tmp_path):
    """Of two micro-batches, with a change after the first: from one replica to four, and to two.

    One of the four has spoiled its window. A spike guard knows the loss of the others.
    """
    bad = 7

    def made(count, folder, changed=()):
        return Run(count, tmp_path / folder, changed, data=in_batches(8, number_at(bad)), accumulate=2, guards=True)

    whole = made(1, "whole").go(3)
    shutil.copytree(tmp_path / "whole", tmp_path / "changed")
    whole.go(11)
    outputs = {}
    for count, end in ((4, bad), (2, 11)):
        run = made(count, "changed", ["replicas"]).go(end)
        outputs |= run.outputs
    run.outputs = outputs
    assert_like(run, whole, first=4)
    assert [step for step in whole.outputs if step % 2 == 0 and not whole.outputs[step]["applied"]] == [bad + 1]
    assert run.said("variable", 4) == whole.said("variable", 4)
    for name in ("loss_limit", "norm_limit"):
        np.testing.assert_allclose(run.said(name, 4), whole.said(name, 4), rtol=1e-4)
        assert np.isfinite(run.said(name)[-1])


class Batches:
    """A source of batches with a state, which counts them."""

    def __init__(self, size):
        self.parts = [part.reshape(-1, size, part.shape[-1]) for part in examples()]
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return tuple(part[(self.at - 1) % len(part)] for part in self.parts)

    def get_state(self):
        return self.at

    def set_state(self, at):
        self.at = at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "counts"), [(in_batches, (4, 1, 2)), (Batches, (0, 0, 0))], ids=["dataset", "source"]
)
def test_smaller_batches_with_more_of_them_in_a_step_and_back(tmp_path, source, counts):
    """Such as four replicas, one with four micro-batches, and two with two."""
    first, second, third = counts
    folder, whole = stopped_and_whole(Run(first, tmp_path / "whole", data=source(8)), tmp_path / "whole")
    changed = ["replicas", "accumulate", "batches"]
    run = Run(second, folder, changed, data=source(2), accumulate=4).go(STOP + 8)
    assert any("batches had 8 examples and have 2" in one for one in run.loop.resumed.changes)
    again = Run(second, folder, data=source(2), accumulate=4).go(STOP + 12)
    assert again.loop.resumed == (STOP + 8, ())
    two = Run(third, folder, changed, data=source(4), accumulate=2).go(STOP + 14)
    outputs = [*run.outputs.values(), *again.outputs.values()]
    groups = [outputs[at : at + 4] for at in range(0, 12, 4)] + [list(two.outputs.values())]
    for group, step in zip(groups, range(STOP + 1, END + 1), strict=True):
        assert {float(one["number"]) for one in group} == {float(whole.outputs[step]["number"])}
        assert [one["attempted"] for one in group] == [False] * (len(group) - 1) + [True]
        np.testing.assert_allclose(np.mean([one["loss"] for one in group]), whole.outputs[step]["loss"], rtol=1e-4)
    assert two.loop.counters.applied == whole.loop.counters.applied == END
    for ours, theirs in zip(two.weights(), whole.weights(), strict=True):
        np.testing.assert_allclose(ours[-1], theirs[0], rtol=1e-3, atol=1e-5)


def test_a_window_that_is_open_when_its_size_changes_is_dropped_and_it_says_so(tmp_path):
    Run(0, tmp_path, accumulate=2).go(STOP)
    run = Run(0, tmp_path, ["accumulate"], accumulate=3).go(STOP + 3)
    assert run.said("attempted") == [False, False, True]
    (said,) = run.loop.resumed.changes
    assert said == "accumulate was 2 and is 3, so that the window that is open after micro-batch 1 is dropped"


REFUSED = {
    "unnamed": ({}, r"replicas was 2 and is 1\..*changed=\['replicas'\]\), on the command line --changed replicas"),
    "half named": ({"changed": ["replicas"], "accumulate": 2}, r"accumulate was 1 and is 2.*\['accumulate'\]"),
    "sizes that do not meet": (
        {"changed": ["replicas", "accumulate", "batches"], "accumulate": 2, "size": 6},
        r"examples in a batch was 8 and is 6, which do not meet after 5 batches\. Use a size that divides it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_a_way_out(shared, case):
    options, said = REFUSED[case]
    run = Run(0, shared[0], **options)
    with pytest.raises(loops.CheckpointError, match=said):
        run.go(END)
    assert run.loop.counters.data == 0


def test_a_composed_step_keeps_its_windows(tmp_path):
    def loop(accumulate, changed=()):
        keras.utils.clear_session()
        model = models.one_layer()
        part = loops.Part("a", model, lambda error: error, keras.optimizers.SGD(0.1))

        def forward(batch):
            return models.squared_error(batch[1][:, :1], model(batch[0], training=True))

        step = loops.ComposedStep([part], forward=forward, accumulate=accumulate)
        saves = loops.Checkpoint(tmp_path, every=4, resume=True, changed=changed)
        return loops.Loop(step, in_batches(8), steps_per_call=1, actions=[saves])

    loop(1).run(2)
    with pytest.raises(loops.CheckpointError, match=r"ComposedStep\(accumulate=1\).*accumulate=2.*only a TrainStep"):
        loop(2, ["accumulate"]).run(4)


@pytest.mark.parametrize(
    "names",
    [["v", "v/replica_1", "v", "v/replica_1", "w"], ["v", "v", "v/replica_1", "v/replica_1", "w"]],
)
def test_components_are_found_by_variable_in_any_order(names):
    found = regrouped.by_variable([(name, "float32", []) for name in names])
    assert [[names[place] for place in one] for one in found] == [["v", "v/replica_1"], ["v", "v/replica_1"], ["w"]]
