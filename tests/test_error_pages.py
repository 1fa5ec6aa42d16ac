"""Each exception and warning has a page with all its messages and an example, and help that an error names."""

import ast
import copy
import functools
import inspect
import pathlib
import pickle
import pydoc
import re
import traceback

import pytest
import tensorflow as tf
from markdown_blocks import run_blocks, text_blocks

import loops.support.errors
import scaler.errors

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "errors"
CLASSES = {
    name: one
    for module in (scaler.errors, loops.support.errors)
    for name, one in inspect.getmembers(module, inspect.isclass)
    if issubclass(one, Exception) and one.__module__ == module.__name__
}
PAGES = [
    *("errors/BadBatch.md", "errors/BadOutputs.md", "errors/CheckpointError.md", "errors/DivergenceWarning.md"),
    *("errors/InvalidArgument.md", "errors/LoopError.md", "errors/NotWritable.md", "errors/OutOfData.md"),
    *("errors/ResumeWarning.md", "errors/ScaleWarning.md", "errors/ScalerError.md", "errors/StuckError.md"),
    *("errors/StuckWarning.md", "errors/TraceWarning.md", "errors/UnsupportedVersion.md", "errors/WorkerLost.md"),
]
FEW = 12
"""Letters: a message that says less in its code than this is made elsewhere."""


def page(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


@functools.cache
def beginnings(name):
    """What the table of a page says that messages begin with, as patterns."""
    rows = re.findall(r"^\| (`.+`) \| .+ \|$", page(name), re.MULTILINE)
    starts = [start for row in rows for start in re.findall(r"`([^`]+)`", row)]
    return {start: ".*?".join(map(re.escape, start.split("…"))) for start in starts}


def known(name, message):
    return [start for start, pattern in beginnings(name).items() if re.match(pattern, message, re.DOTALL)]


def spoken(node):
    """A message as the code has it, with … for what varies."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(spoken, node.values))
    if isinstance(node, ast.BinOp):
        return spoken(node.left) + spoken(node.right)
    return "…"


def called(node):
    return getattr(node, "attr", getattr(node, "id", None))


@pytest.fixture(scope="module")
def messages():
    """Class and message of each place that raises one of them, or warns with it."""
    found = set()
    for path in (path for folder in ("scaler", "loops", "halfstep") for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in CLASSES):
            continue
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args]
        for node in calls:
            names = [called(node.func)] + [called(one) for one in node.args[1:2]] * (called(node.func) == "warn")
            found |= {(name, spoken(node.args[0])) for name in names if name in CLASSES}
            # Of loops/support/errors.py.
            if called(node.func) == "check" and len(node.args) == 3 and path.is_relative_to(ROOT / "loops"):
                found.add(("InvalidArgument", f"{spoken(node.args[0])}: expected {spoken(node.args[2])}."))
    return {(name, said) for name, said in found if sum(map(str.isalpha, said)) >= FEW}


def test_each_has_a_page_and_is_in_the_index():
    assert {path.stem for path in FOLDER.glob("*.md")} == {"README", *CLASSES}
    assert sorted(PAGES) == [f"errors/{name}.md" for name in sorted(CLASSES)]
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \|", page("README"), re.MULTILINE)
    assert sorted(rows) == sorted((name, name) for name in CLASSES)
    assert [name for name, one in CLASSES.items() if len(inspect.getdoc(one).split()) <= 15] == []


def test_the_tables_know_the_beginning_of_each_message(messages):
    """A message that is missing gets into a row of its class's page, docs/errors/NAME.md."""
    assert len(messages) > 450
    assert [(name, said) for name, said in sorted(messages) if not known(name, said)] == []


def test_the_tables_have_no_beginning_that_no_message_has(messages):
    """Other than those of sentences that are put together elsewhere, whose words stand in the code, too."""
    sources = [
        path.read_text(encoding="utf-8") for folder in ("scaler", "loops") for path in (ROOT / folder).rglob("*.py")
    ]
    code = re.sub(r"\"\s*\n\s*(?:f?\")", "", "\n".join(sources))
    lost = []
    for name in CLASSES:
        for start, pattern in beginnings(name).items():
            parts = [part.strip(" ,") for part in re.split("…|: ", start)]
            if not any(kind == name and re.match(pattern, said, re.DOTALL) for kind, said in messages):
                lost += [(name, start)] if not all(part in code for part in parts) else []
    assert lost == []


@pytest.mark.slow_with("errors/DivergenceWarning.md")
@pytest.mark.parametrize("path", PAGES)
def test_its_example_prints_what_is_shown(path, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow" if "Trace" in path or "LoopError" in path else "keras")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CONFIG", "")
    name, text = pathlib.Path(path).stem, page(pathlib.Path(path).stem)
    run_blocks(text, tmp_path)
    printed = capsys.readouterr().out
    (shown,) = text_blocks(text)
    assert without_versions(printed) == without_versions(shown)
    kind, _, message = printed.partition(": ")
    assert f"except hs.{name} as" in text
    assert kind == (name if name != "ScalerError" else "InvalidArgument")
    assert known(kind, message)


def without_versions(text):
    """And without the sizes of files, which depend on them."""
    return re.sub(r"Keras \S+ on TensorFlow \S+|\d+ bytes", "-", text)


ERRORS = [name for name, one in CLASSES.items() if issubclass(one, scaler.ScalerError)]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_its_help_in_a_note(name):
    error = CLASSES[name]("what happened")
    assert str(error) == "what happened"
    assert error.args == ("what happened",)
    # Also a copy, before anybody asked for it.
    for same in (copy.copy(CLASSES[name]("it")), pickle.loads(pickle.dumps(CLASSES[name]("it")))):
        assert same.__notes__ == error.__notes__
    (note,) = error.__notes__
    (asked,) = re.fullmatch(r'halfstep: help\("([\w.]+)"\) says what to do', note).groups()
    assert inspect.getdoc(CLASSES[name]) in pydoc.plain(pydoc.render_doc(asked)).replace("\n |  ", "\n")


def test_the_note_is_one_beside_those_of_the_user():
    error = scaler.StuckError("what happened")
    for note in ("first", "second"):
        # `add_note` of Python 3.11, also where there is none.
        getattr(error, "add_note", error.__notes__.append)(note)
    expected = ['halfstep: help("halfstep.StuckError") says what to do', "first", "second"]
    assert error.__notes__ == expected
    for same in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(same), str(same), same.__notes__) == (scaler.StuckError, "what happened", expected)
    assert scaler.StuckError("what happened").__notes__ == expected[:1]


def test_an_error_that_autograph_makes_again_has_it():
    @tf.function
    def step(x):
        if tf.reduce_sum(x) > 0:
            raise scaler.InvalidArgument("not so")
        return x

    with pytest.raises(scaler.InvalidArgument) as caught:
        step(tf.ones([2]))
    assert str(caught.value).startswith("not so")
    assert caught.value.__notes__ == ['halfstep: help("halfstep.InvalidArgument") says what to do']


def test_an_error_of_a_user_names_the_help_of_its_base():
    class Mine(loops.NotWritable):
        def __init__(self, message, *, path):
            super().__init__(message)
            self.path = path

    assert Mine("no", path="here").__notes__ == ['halfstep: help("halfstep.NotWritable") says what to do']


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 shows no notes")
def test_a_traceback_ends_with_it():
    text = traceback.format_exception_only(scaler.InvalidArgument("not so"))
    assert text == [
        "scaler.errors.InvalidArgument: not so\n",
        'halfstep: help("halfstep.InvalidArgument") says what to do\n',
    ]
