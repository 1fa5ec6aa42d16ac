"""Guards that a run's loop is built again from its folder, by its program or by what halfstep train left there."""

import shutil
import sys

import pytest
from rewind_cases import counting, listing

import loops
import scaler
from loops.run.rewind import open_run, rewind
from loops.run.train import RunOptions, train

pytestmark = pytest.mark.slow

STEPS = 9


@pytest.fixture(scope="module")
def trained_once(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    options = RunOptions("float16", "dynamic:growth_interval=3", STEPS, 3, batch_size=32)
    train(small, options, out, checkpoint_every=4)
    return out


@pytest.fixture
def trained(trained_once, tmp_path, small_digits):
    return shutil.copytree(trained_once, tmp_path / "trained")


@pytest.mark.exhaustive_with("summary.json", "checkpoints")
@pytest.mark.parametrize("left", ["checkpoints", "summary.json"])
def test_a_run_of_train_is_had_again(trained, left):
    for path in [trained / name for name in ("checkpoints", "summary.json") if name != left]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = listing(trained)
    moment = rewind(open_run(trained), 7)
    assert (moment.differs, moment.began_at) == (None, 4 if left == "checkpoints" else 0)
    assert moment.train_step.loss_scaler.strategy == scaler.Dynamic(growth_interval=3)
    assert moment.batch[1].shape == [32]
    assert listing(trained) == before


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        (None, "neither a readable checkpoint in checkpoints nor a summary.json"),
        ("[1]", "neither a readable checkpoint"),
        ("{", "neither a readable checkpoint"),
        ('{"task": "digits", "seed": 0}', "lack its batch_size, .*strategy, unit_scaled, which those of halfstep"),
        ('{"task": "digits", "replicas": 2}', "its 2 replicas cannot be rewound.*--build"),
    ],
)
def test_folders_that_do_not_say_what_the_run_was(tmp_path, summary, says):
    if summary:
        (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(loops.LoopError, match=says):
        open_run(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(scaler.InvalidArgument, match="no such folder"):
        open_run(tmp_path / "absent")
    with pytest.raises(scaler.InvalidArgument, match="no such folder"):
        open_run(tmp_path / "absent", "program:build")


def test_checkpoints_of_another_program_are_told_apart(tmp_path):
    counting(tmp_path, every=2).run(2)
    (tmp_path / "ckpt").rename(tmp_path / "checkpoints")
    with pytest.raises(loops.LoopError, match=r"a program made this run, not halfstep train.*--build my_run:build"):
        open_run(tmp_path)


# ---------------------------------------------------------------------------------------------- programs


PROGRAM = """
import pathlib
import sys
import tensorflow as tf
import loops

def build(run):
    from helper_of_rewound_program import numbers
    total = tf.Variable(0.0)
    def step(number):
        total.assign_add(tf.cast(number, tf.float32))
        return {"loss": tf.identity(total)}
    actions = [loops.JsonLines(run / "log" / "steps.jsonl"), loops.Checkpoint(run / "ckpt", every=2)]
    return loops.Loop(step, numbers(), actions=actions)

def elsewhere():
    return build(pathlib.Path("elsewhere"))

def nothing(run): ...

def takes_nothing(): ...

def may_take_one(run=None):
    raise loops.LoopError(f"given {run}")

def without(run):
    return loops.Loop(lambda number: {"loss": 0.0}, tf.data.Dataset.range(3))

def fails(run):
    raise KeyError("data")

def refuses(run):
    raise loops.LoopError("not today.")

number = 3
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The folder of a program, which is the current one, with a module `rewound_program`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewound_program.py").write_text(PROGRAM)
    (tmp_path / "helper_of_rewound_program.py").write_text(
        "import tensorflow as tf\ndef numbers(): return tf.data.Dataset.range(9)\n"
    )
    (tmp_path / "broken_rewound_program.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "run").mkdir()
    yield tmp_path
    for name in ("rewound_program", "helper_of_rewound_program", "broken_rewound_program"):
        sys.modules.pop(name, None)


def test_a_program_builds_its_own_loop(program):
    path = list(sys.path)
    open_run("run", "rewound_program:build").run(5)
    moment = rewind(open_run(program / "run", "rewound_program:build"), 4)
    assert (moment.differs, moment.began_at, moment.batch.numpy()) == (None, 2, 3)
    assert sys.path == path


@pytest.mark.parametrize("kept", ["checkpoints", "steps.jsonl"])
def test_a_program_that_writes_elsewhere_is_not_taken_for_the_run(program, kept):
    """What is in the folder that was named would go unread."""
    assert len(open_run("run", "rewound_program:elsewhere").actions) == 2
    (program / "run" / kept).mkdir()
    with pytest.raises(
        scaler.InvalidArgument,
        match=rf"has elsewhere/[a-z/.]+ among its files, but run has {kept} of its own: expected",
    ):
        open_run("run", "rewound_program:elsewhere")
    (program / "elsewhere").mkdir()
    open_run("elsewhere", "rewound_program:elsewhere")


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("rewound_program", scaler.InvalidArgument, "expected module:function"),
        (":build", scaler.InvalidArgument, "expected module:function"),
        ("rewound_program:", scaler.InvalidArgument, "expected module:function"),
        ("rewound_programme:build", scaler.InvalidArgument, "no module 'rewound_programme' here, in "),
        ("rewound_program.inner:build", scaler.InvalidArgument, "no module 'rewound_program.inner' here"),
        ("rewound_program:built", scaler.InvalidArgument, "module 'rewound_program' has no function 'built'"),
        ("rewound_program:number", scaler.InvalidArgument, "module 'rewound_program' has no function 'number'"),
        ("rewound_program:nothing", scaler.InvalidArgument, "it returned None: expected an hs.Loop"),
        ("rewound_program:takes_nothing", scaler.InvalidArgument, "it returned None: expected an hs.Loop"),
        ("rewound_program:may_take_one", loops.LoopError, r"^given run\n.*halfstep.LoopError.* says what to do$"),
        ("rewound_program:without", scaler.InvalidArgument, "has no hs.Checkpoint among its actions"),
        ("rewound_program:fails", loops.LoopError, "it raised KeyError: 'data'"),
        ("rewound_program:refuses", loops.LoopError, r"^not today\.\n.*halfstep.LoopError.* says what to do$"),
        ("broken_rewound_program:build", loops.LoopError, "it raised ModuleNotFoundError: .*no_such_module_at_all"),
    ],
)
@pytest.mark.usefixtures("program")
def test_programs_that_cannot_build_it(text, error, says):
    path = list(sys.path)
    with pytest.raises(error, match=says):
        open_run("run", text)
    assert sys.path == path
