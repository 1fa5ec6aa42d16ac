"""What every test stands on: quiet logs, four CPU devices, clean Keras state, and the four ways a step may be run."""

import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import pathlib
import resource
import signal
import sys
import unittest.mock
import weakref

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Where oneDNN is slow in float16, tests would take ten times as long, and each that scales by hand would be told so.
if "avx512_fp16" in pathlib.Path("/proc/cpuinfo").read_text(errors="replace"):
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Consoles of tests are terminals that can move a cursor, also where the tests run without one.
os.environ["TERM"] = "xterm"
# pytest-xdist tells its processes how wide the terminal is, and nobody asked them to write for one.
os.environ.pop("COLUMNS", None)

# What tests of one folder share, those of others may import.
sys.path += [str(pathlib.Path(__file__).parent / folder) for folder in ("distributed", "scaler")]

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
import ways
from mirrored import let_strategies_follow_each_other
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.python.util import tf_stack

from loops.loop import calls
from scaler.backend import layers
from scaler.gate import joined, layer_state, proofs

# Devices are fixed once TensorFlow starts; replicas of a MirroredStrategy need several.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)

let_strategies_follow_each_other()

# TensorFlow takes a minute to let go of the traced functions of a hundred tests, and four for those of a thousand. So
# what a test leaves behind stays while all processes have room for it.
gc.disable()

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)

_seed_all = keras.utils.set_random_seed


def _seed_and_keep_functions(seed):
    """As Keras's own, but TensorFlow does not optimize each traced function again, which it does after a seed.

    What is random in Keras and in `tf.data` begins anew all the same. `tf.random.set_seed` is as it was.
    """
    with unittest.mock.patch.object(context.pywrap_tfe, "TFE_ContextClearCaches", id):
        _seed_all(seed)


keras.utils.set_random_seed = _seed_and_keep_functions

_made = weakref.WeakValueDictionary()
_new, _number = keras.layers.Layer.__new__, itertools.count()


def _new_and_known(kind, *arguments, **named):
    layer = _made[next(_number)] = _new(kind, *arguments, **named)
    return layer


@functools.wraps(layers.alive)
def _alive(kind):
    """As the search among all objects, of which a process has millions by now: it takes longer than a step's trace.

    `tests/backend/test_living_objects.py` and `tests/keras/test_protect_other_models.py` search as ever.
    """
    yield [layer for layer in list(_made.values()) if isinstance(layer, kind)]


keras.layers.Layer.__new__ = _new_and_known
layers.alive = layer_state.alive = _alive


@pytest.fixture(autouse=True, scope="module")
def _layers_of_this_file():
    """The collector is off, so that layers of all files before are alive: an eager step would look at each of them."""
    _made.clear()


# TensorFlow keeps the Python stack that made an operation, of each: that is 7 % of the time of all tests. Here they all
# keep the first one's, unless a test asks for `lines`.
tf_stack.extract_stack = functools.cache(tf_stack.extract_stack)

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("slow", deadline=None, max_examples=2000)
# For the mutation tester, to which the first failure says enough: no time is spent on making it small.
hypothesis.settings.register_profile(
    "mutants", deadline=None, derandomize=True, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# The environment may turn it on for all tests, as `make gpu` does.
DETERMINISTIC = config.is_op_determinism_enabled()
# On a GPU products of float32 would be rounded to ten bits before they are added. Tests compare with references.
tf.config.experimental.enable_tensor_float_32_execution(False)

pytest_plugins = ["budget"]

MODES = ("eager", "graph", "loop", "xla")
TIERS = ("exhaustive", "slow")
LONGEST = (
    *("test_docs.py", "test_audit.py", "test_promise_machine.py", "test_recipes.py", "test_readme.py"),
    *("test_fit_on_replicas.py", "test_other_replicas.py", "test_exact_resume.py", "test_cli.py"),
)
_TIERS = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--select", action="store_true", help="steps select their new values, as on a GPU")


def pytest_configure(config):
    if config.getoption("--select"):
        ways.select_always()


def pytest_report_header():
    return f"TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the parameters that `slow_with` and `exhaustive_with` name, before `-m` chooses."""
    selects = proofs.selects_by_default()
    items[:] = [one for one in items if not (one.get_closest_marker("second_look") and (selects or _is(one, "xla")))]
    if config.getoption("--select"):
        items[:] = [item for item in items if not _is(item, "eager")]
    for item in items:
        for tier in TIERS:
            if item.nodeid.partition("[")[2][:-1] in _named(item, tier):
                item.add_marker(tier)
    if [pathlib.Path(place).resolve() for place in config.args] == [pathlib.Path(__file__).parent]:
        named = {f"{item.nodeid.partition('[')[0]}[{name}]" for item in items for name in _named(item)}
        config.stash[_TIERS] = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}, named
    # A process takes whole files: the longest must not begin when all others end.
    items.sort(key=lambda item: item.path.name not in LONGEST)


def _named(item, *tiers):
    """The parameters that marks of a test name, for any tier or for one."""
    return [name for tier in tiers or TIERS for mark in item.iter_markers(f"{tier}_with") for name in mark.args]


def _is(item, mode):
    """Whether a parameter says that the test runs in one of the `MODES`: eager, nothing selects; in XLA, all does."""
    return mode in item.nodeid.partition("[")[2].rstrip("]").split("-")


def pytest_collection_finish(session):
    # What is imported by now stays until the end: the collections that tests ask for need not go through it.
    gc.collect()
    gc.freeze()
    _read_sources_once()


def _read_sources_once():
    """Hypothesis draws numbers from the sources of all modules: also of the thousands that AutoGraph writes."""
    with contextlib.suppress(ImportError, AttributeError):  # Of some versions: others do not read sources.
        from hypothesis.internal.conjecture import providers

        found = providers._get_local_constants()
        providers._get_local_constants = lambda: found


@pytest.fixture(autouse=True)
def _clean_state():
    """The same random numbers for every test, and no dtype policy or deterministic operations left behind by one."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    tf.config.run_functions_eagerly(False)
    if not DETERMINISTIC:
        config.disable_op_determinism()
    if _memory() > _share_of_memory():
        gc.unfreeze()
    # What only a test's own circles hold goes now: an iterator of tf.data that goes late may keep the process for up to
    # a minute. Its autotuning sleeps ever longer, and TensorFlow wakes it before it says that it is to end.
    gc.collect()
    gc.freeze()


def _memory():
    """What this process takes, in bytes."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@functools.cache
def _share_of_memory():
    """How many bytes a process of pytest may take: a fifth is left for what tests start."""
    machine = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    return 0.8 * min(machine, float(allowed.replace("max", "inf"))) / processes


@pytest.fixture(scope="session", params=MODES)
def execute(request):
    """Wraps a function so that it runs in eager mode, as a graph, in a `tf.range` loop of one step, or under XLA.

    The function takes and returns nested structures of tensors and `tf.IndexedSlices`. It is traced once a signature.
    """
    return {"eager": _eager, "graph": tf.function, "loop": _loop, "xla": _xla}[request.param]


def _eager(function):
    return lambda *args: function(*_tensors(args))


def _xla(function):
    return tf.function(function, jit_compile=True)


def _loop(function):
    returned = {}

    def flat(*args):
        returned["structure"] = function(*args)
        return tf.nest.flatten(returned["structure"], expand_composites=True)

    inner = tf.function(flat)

    @tf.function
    def run(*args):
        # The loop needs values of the right shapes to start from, so the body is traced before it.
        body = inner.get_concrete_function(*args)
        values = [tf.zeros([size or 0 for size in spec.shape], spec.dtype) for spec in body.structured_outputs]
        for _ in tf.range(1):
            tf.autograph.experimental.set_loop_options(
                shape_invariants=[(v, s.shape) for v, s in zip(values, body.structured_outputs, strict=True)]
            )
            values = inner(*args)
        return values

    def wrapper(*args):
        values = run(*_tensors(args))
        return tf.nest.pack_sequence_as(returned["structure"], values, expand_composites=True)

    return wrapper


def _tensors(args):
    return tf.nest.map_structure(
        lambda x: tf.convert_to_tensor(x) if isinstance(x, (np.ndarray, np.generic)) else x, args
    )


@pytest.fixture(scope="session")
def tiers(pytestconfig):
    """The marks of every test, and each that a mark names by its parameters; None where not all were collected."""
    return pytestconfig.stash.get(_TIERS, None)


@pytest.fixture
def eagerly():
    """Functions run without a graph: for a few steps of which nothing is asked that a graph decides."""
    tf.config.run_functions_eagerly(True)


@pytest.fixture
def lines():
    """Every operation knows the line that made it."""
    with unittest.mock.patch.object(tf_stack, "extract_stack", tf_stack.extract_stack.__wrapped__):
        yield


@pytest.fixture(scope="module")
def as_graphs():
    """No `Loop` compiles its step by its own choice, of which tests/loops/loop/test_compilation.py is."""
    with unittest.mock.patch.object(calls, "may_compile", return_value=False):
        yield


@pytest.fixture
def tensorboard(monkeypatch):
    """Says whether TensorBoard is installed, which this environment need not have: it is, until a test says no."""
    found = importlib.util.find_spec
    said = {"tensorboard": True}

    def find_spec(name, *arguments):
        return said[name] or None if name in said else found(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return lambda installed: said.update(tensorboard=installed)


@pytest.fixture
def chunks(monkeypatch):
    """The chunks of small variables that a step joins; as small as possible, so that a few variables make several."""
    made = []
    real = joined.chunks_of
    monkeypatch.setattr(joined, "_CHUNK", 18)
    monkeypatch.setattr(joined, "_FEWEST", 2)
    monkeypatch.setattr(joined, "_WORTH_JOINING", 2)
    monkeypatch.setattr(joined, "chunks_of", lambda *arguments: made.append(real(*arguments)) or made[-1])
    return made
