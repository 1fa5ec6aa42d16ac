"""Guards that private names of TensorFlow and Keras stand in scaler/backend alone, each with what it is for."""

import ast
import pathlib
from collections.abc import Iterator

import scaler

ROOT = pathlib.Path(scaler.__file__).parent
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
OF_OURS = {
    "_halfstep_given",
    "_halfstep_owner",
    "_halfstep_scale",
    "_halfstep_last",
    "_halfstep_loss",
    "_halfstep_loss_finite",
    "_halfstep_result_of",
    "_halfstep_steps",
    "_scaler_protected",
    "_tensor_state",
    "_window",
    "_noinline",
    "_",
    "_Function",
}
INTERNAL = ("tensorflow.python", "keras.src")
FILES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


def defined(trees):
    """The names of functions, classes and attributes that the package makes itself."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


OURS = {*defined(FILES.values())} - {"_lookup_dependency"}


def private(tree: ast.AST) -> Iterator[str]:
    """The private names of others that a file touches: as attributes, as strings, in its imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(INTERNAL):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(INTERNAL))
        name = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
        if not isinstance(name, str) or not name.isidentifier() or not name.startswith("_"):
            continue
        if name == "__internal__" or not (name.endswith("__") or name in OURS | OF_NAMED_TUPLES | OF_OURS):
            yield name


def test_they_stand_in_the_backend_with_what_they_are_for():
    for path, tree in FILES.items():
        found = set(private(tree))
        assert not found or path.parent.name == "backend", f"{path}: give it a function in scaler/backend"
        register = ast.get_docstring(tree) or ""
        names = {name.rsplit(".", 1)[-1] for name in found} - {"__internal__", "record", "control_flow_util"}
        assert [name for name in sorted(names) if name not in register] == [], path


def test_a_private_name_would_be_found():
    source = "from tensorflow.python.eager import context; x._learning_rate; getattr(x, '_rng'); tf.__internal__"
    assert set(private(ast.parse(source))) == {
        "tensorflow.python.eager.context",
        "_learning_rate",
        "_rng",
        "__internal__",
    }
