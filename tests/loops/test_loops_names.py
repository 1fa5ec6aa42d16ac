"""Guards the names `loops` gives away, and that importing it needs nothing of the extras."""

import ast
import pathlib
import pkgutil
import subprocess
import sys
import types

import pytest
from private_names import sources, walked

import loops
import scaler
import scaler.testing

_NAMES = """
import sys
extras = ("matplotlib", "sklearn", "tensorboard", "pyarrow")
for name in (*extras, "loops"):
    sys.modules[name] = None   # As if it were not installed: Keras looks for matplotlib by itself.
import scaler
scaler.LossScaler()
# Namespaces that few programs use are a third of what `import scaler` would take.
later = {"scaler.layerwise", "scaler.observe", "scaler.presets"}
assert not later & set(sys.modules)
assert later | {"scaler.gradients"} <= {f"scaler.{name}" for name in dir(scaler)}
del sys.modules["loops"]
import loops, halfstep.commands.train, loops.run, loops.diagnose.doctor.machine, loops.tasks, loops.study.compare
found = [n for n, m in sys.modules.items() if m and n.partition(".")[0] in extras]
print("found", found)
"""


def test_all_lists_the_public_names_in_order():
    public = [
        name
        for name, value in vars(loops).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert loops.__all__ == sorted([*public, "observe"])  # The namespace of what is told of a run.
    assert len(set(loops.__all__)) == len(loops.__all__)


@pytest.mark.parametrize("package", [loops, scaler], ids=["loops", "scaler"])
def test_every_namespace_is_an_attribute_without_an_import_of_its_own(package, monkeypatch):
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_"]
    assert {"loops": "tasks", "scaler": "testing"}[package.__name__] in names
    for name in names:
        if name not in package.__all__:
            if isinstance(vars(package).get(name), types.ModuleType):
                monkeypatch.delattr(package, name)  # As if no other import had brought it.
            assert getattr(package, name).__name__ == f"{package.__name__}.{name}"
    for name in ("taskz", "__path", "a.b"):
        assert not hasattr(package, name)


def test_dir_shows_what_is_public():
    assert dir(loops) == sorted([*loops.__all__, "tasks", "views"])


def test_every_public_class_says_what_it_is():
    for name in loops.__all__:
        assert getattr(loops, name).__doc__, name


def test_errors_are_one_tree():
    assert issubclass(loops.OutOfData, loops.LoopError)
    assert issubclass(loops.BadOutputs, loops.LoopError)


@pytest.mark.slow
def test_importing_needs_no_extras_and_scaler_no_loops():
    result = subprocess.run([sys.executable, "-c", _NAMES], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "found []\n", result.stderr[-2000:]


PACKAGE = pathlib.Path(loops.__file__).parent


def imports(tree):
    """What is imported of scaler otherwise than as `import scaler` or `from scaler import` a public name."""
    for node in walked(tree):
        if isinstance(node, ast.Import):
            renamed = [one.name for one in node.names if one.name == "scaler" and one.asname]
            yield from [*renamed, *(one.name for one in node.names if one.name.startswith("scaler."))]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "scaler":
            names = scaler.__all__ if node.module == "scaler" else ()
            yield from (f"{node.module}.{one.name}" for one in node.names if one.name not in names)


def chains(tree):
    """Every `scaler.x.y` as the names after `scaler`, the longest only."""
    inner = {id(node.value) for node in walked(tree) if isinstance(node, ast.Attribute)}
    for node in walked(tree):
        names, at = [], node
        while isinstance(at, ast.Attribute):
            names.insert(0, at.attr)
            at = at.value
        if names and id(node) not in inner and isinstance(at, ast.Name) and at.id == "scaler":
            yield names


def is_public(names):
    """Whether the first name is public, and the second, where the first is a namespace."""
    space = scaler.testing if names[0] == "testing" else getattr(scaler, names[0], None)
    if names[0] not in (*scaler.__all__, "testing"):
        return False
    if not isinstance(space, types.ModuleType) or len(names) == 1:
        return not any(name.startswith("_") for name in names)
    public = getattr(space, "__all__", [name for name in vars(space) if not name.startswith("_")])
    return names[1] in public or names[1] == "__all__"


def misused(tree):
    return [*imports(tree), *(".".join(names) for names in chains(tree) if not is_public(names))]


def test_loops_uses_public_names_of_scaler():
    found = {str(path.relative_to(PACKAGE)): misused(tree) for path, tree in sources(PACKAGE).items()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from scaler.backend.graphs import in_xla",
        "import scaler.backend",
        "from scaler import Reading",
        "scaler.gate.loss_scaler",
        "scaler.Warmup(x)",
        "scaler.strategies.base",
        "scaler.LossScaler._say",
        "import scaler as another",
    ],
)
def test_what_is_not_public_is_found(source):
    assert misused(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["import scaler", "from scaler import LossScaler", "scaler.strategies.Warmup", "scaler.authoring.owner_of"],
)
def test_what_is_public_is_left_alone(source):
    assert misused(ast.parse(source)) == []
