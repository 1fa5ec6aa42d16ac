"""Guards what SECURITY.md says: no pickle, nothing evaluated, and nothing imported by a name from a file."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = [path for room in ("scaler", "loops", "halfstep") for path in sorted((ROOT / room).rglob("*.py"))]
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "torch"}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {"np.load", "numpy.load", "np.fromregex", "os.system", "os.popen", "keras.models.load_model"}
UNSAFE_ATTRIBUTES |= {"keras.saving.load_model", "tf.saved_model.load", "tf.keras.models.load_model", "runpy.run_path"}
SUSPICIOUS = re.compile(
    rf"\b({'|'.join(each.rpartition('.')[2] for each in UNSAFE_MODULES | UNSAFE_NAMES | UNSAFE_ATTRIBUTES)}"
    r"|allow_pickle|shell)\b"
)
"""In a file without such a word nothing has to be looked for."""
IMPORTING = {
    "scaler/__init__.py": "names of its own rooms",
    "loops/__init__.py": "names of its own rooms",
    "loops/views/__init__.py": "one name",
    "loops/backend/generators.py": "names that stand in it",
    "loops/support/user_function.py": "--build and --model",
    "halfstep/__init__.py": "its own command",
    "halfstep/front_door.py": "the packages of Halfstep",
}
"""The files that import by a name, and where the name comes from: never a file of a run."""
STARTING = {
    "halfstep/commands/train.py": "workers",
    "loops/diagnose/doctor/layer_times.py": "itself, with oneDNN and without",
}
"""The files that start a process."""


def spelled(node):
    """A name with dots as it is written, or nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@functools.cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def found_in(path):
    """What a file does that a reader of files must not do."""
    if not SUSPICIOUS.search(path.read_text(encoding="utf-8")):
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] in UNSAFE_MODULES:
                yield node.module, node.lineno
        elif isinstance(node, ast.Call):
            name = spelled(node.func)
            if name in UNSAFE_NAMES | UNSAFE_ATTRIBUTES:
                yield name, node.lineno
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in ("allow_pickle", "shell") and not off:
                    yield keyword.arg, node.lineno


def calling(*names):
    """The files that call one of these."""
    last = [name.rpartition(".")[2] for name in names]
    return {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(word in path.read_text(encoding="utf-8") for word in last)
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and spelled(node.func) in names
    }


@pytest.mark.parametrize("room", ["scaler", "loops", "halfstep"])
def test_no_pickle_and_nothing_evaluated(room):
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] == room:
            assert list(found_in(path)) == [], path


def test_the_search_finds_them(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("import pickle\nfrom dill import x\neval(x)\nnp.load(x, allow_pickle=True)\nrun(x, shell=True)\n")
    assert sorted(name for name, _ in found_in(path)) == ["allow_pickle", "dill", "eval", "np.load", "pickle", "shell"]


def test_only_these_files_import_by_a_name():
    assert calling("importlib.import_module", "import_module") <= set(IMPORTING)


def test_only_these_files_start_a_process():
    assert calling("subprocess.Popen", "subprocess.run", "subprocess.check_output", "os.execv") == set(STARTING)
