"""Guards that names which share a variable are kept, saved and restored as if each had its own."""

import copy

import pytest
import tensorflow as tf
from mirrored import mirrored
from ways import graph

from scaler.backend import replicas
from scaler.backend.packed import ByName, Entry, Packed
from scaler.backend.variables import shared_variable
from scaler.errors import InvalidArgument


class Holder(ByName):
    _ENTRIES, _VARIABLES = ("entries",), "variables_of_it"

    def __init__(self, make=shared_variable, **values):
        super().__init__()
        self.packed = Packed({name: tf.constant(value) for name, value in values.items()}, "packed", make)
        self.entries, self.variables_of_it = self.packed.entries(), [self.packed.variable]

    def __setstate__(self, state):
        super().__setstate__(state)
        self.entries, self.variables_of_it = self.packed.entries(), [self.packed.variable]

    def read(self):
        return {name: entry.numpy().tolist() for name, entry in self.entries.items()}


@pytest.fixture(params=[shared_variable, replicas.local_variable], ids=["shared", "local"])
def make(request):
    return request.param


def test_each_name_has_its_value_and_shape():
    values = {name: tf.constant(value, tf.int64) for name, value in (("a", 1), ("v", [[2, 3], [4, 5]]), ("b", 6))}
    packed = Packed(values, "packed", shared_variable)
    read = graph(packed.read)()
    assert {name: value.numpy().tolist() for name, value in read.items()} == {"a": 1, "v": [[2, 3], [4, 5]], "b": 6}
    packed.variable.assign(packed.joined({**read, "b": tf.constant(7, tf.int64)}))
    assert packed.variable.numpy().tolist() == [1, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [None, 2])
def test_a_checkpoint_gives_what_both_have(tmp_path, make, number):
    with mirrored(number).scope() if number else tf.distribute.get_strategy().scope():
        saved, other = Holder(make, a=1.0, v=[2.0, 3.0], b=4.0), Holder(make, b=5.0, c=6.0)
    path = tf.train.Checkpoint(held=saved).save(str(tmp_path / "ckpt"))
    status = tf.train.Checkpoint(held=other).restore(path)
    assert other.read() == {"b": 4.0, "c": 6.0}
    with pytest.raises(AssertionError):
        status.assert_consumed()
    saved.entries["v"].assign([7.0, 8.0])
    tf.train.Checkpoint(held=saved).restore(path).assert_consumed()
    assert saved.read() == {"a": 1.0, "v": [2.0, 3.0], "b": 4.0}
    assert len({part.numpy().tobytes() for part in getattr(saved.packed.variable, "values", [])}) <= 1


def test_a_checkpoint_of_the_variables_holds_them_whole(tmp_path):
    held = Holder(a=1.0, b=2.0)
    path = tf.train.Checkpoint(mine=list(held.variables)).write(str(tmp_path / "ckpt"))
    held.packed.variable.assign([0.0, 0.0])
    tf.train.Checkpoint(mine=list(held.variables)).read(path).assert_consumed()
    assert held.read() == {"a": 1.0, "b": 2.0}


def test_another_shape_is_refused_in_a_sentence(tmp_path):
    path = tf.train.Checkpoint(held=Holder(v=[1.0, 2.0])).save(str(tmp_path / "ckpt"))
    other = Holder(v=[1.0, 2.0, 3.0])
    other.entries["v"] = Entry(other.packed, "v", "a history", "give it as many")
    with pytest.raises(InvalidArgument, match=r"a history with shape \(2,\).* has \(3,\): give it as many"):
        tf.train.Checkpoint(held=other).restore(path)
    assert other.read() == {"v": [1.0, 2.0, 3.0]}


def test_a_saved_model_has_the_variable(tmp_path):
    held = Holder(a=1.0, b=2.0)
    held.add = graph(lambda: held.packed.variable.assign_add([1.0, 1.0]))
    held.add()
    tf.saved_model.save(held, str(tmp_path))
    assert tf.saved_model.load(str(tmp_path)).add().numpy().tolist() == [3.0, 4.0]
    assert held.read() == {"a": 2.0, "b": 3.0}


def test_a_copy_has_its_own(tmp_path):
    held = Holder(a=1.0)
    held.mine = tf.Variable(3.0)
    made = copy.deepcopy(held)
    made.entries["a"].assign(2.0)
    made.mine.assign(4.0)
    assert (held.read(), made.read()) == ({"a": 1.0}, {"a": 2.0})
    path = tf.train.Checkpoint(held=made).save(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(held=held).restore(path).assert_consumed()
    assert (held.read(), float(held.mine)) == ({"a": 2.0}, 4.0)  # What a subclass has is in a copy's checkpoint, too.
