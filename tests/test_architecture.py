"""Guards the drawing of the rooms: each stands in it once, and imports only from lines above its own."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def drawn(package):
    """The line of each room."""
    block = re.search(rf"^    {package}/\n((?:      .+\n)+)", TEXT, re.MULTILINE).group(1)
    rooms = re.findall(r"^      (\w+)  ", block, re.MULTILINE)
    assert len(set(rooms)) == len(rooms)
    return {room: number for number, room in enumerate(rooms)}


def files(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        room = path.relative_to(ROOT / package).with_suffix("").parts[0]
        if room not in ("__init__", "__main__"):
            yield room, path


def statements(tree):
    """Those of a file without their expressions, which hold no import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node
            yield from statements(node)


@functools.cache
def imports_of(path):
    """What a file imports, also where only a type checker or a function does."""
    nodes = statements(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path, package):
    """The rooms of the package that a file imports from."""
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith(f"{package}."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith(f"{package}."))


def packages(path):
    """The packages that a file imports from, wherever in it."""
    nodes = imports_of(path)
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@functools.cache
def arrows(package):
    return {(room, other) for room, path in files(package) for other in imported(path, package) if other != room}


@pytest.mark.parametrize("package", ["scaler", "loops"])
def test_every_room_is_drawn_and_imports_go_up(package):
    lines = drawn(package)
    assert {room for room, _ in files(package)} == set(lines)
    assert len(arrows(package)) > 20
    assert {(room, other) for room, other in arrows(package) if lines[other] >= lines[room]} == set()


@pytest.mark.parametrize(("package", "entries", "floors"), [("scaler", 18, 10), ("loops", 16, 10)])
def test_a_house_stays_small(package, entries, floors):
    assert len([path for path in (ROOT / package).iterdir() if path.name != "__pycache__"]) <= entries

    @functools.cache
    def floor(room):
        return 1 + max((floor(other) for one, other in arrows(package) if one == room), default=0)

    assert max(floor(room) for room, _ in files(package)) <= floors


@pytest.mark.parametrize(("package", "others"), [("scaler", ["loops", "halfstep"]), ("loops", ["halfstep"])])
def test_a_package_knows_nothing_of_those_above_it(package, others):
    assert [path for _, path in files(package) for other in others if other in packages(path)] == []


def test_the_front_door_holds_names_and_nothing_else():
    tree = ast.parse((ROOT / "halfstep" / "__init__.py").read_text(encoding="utf-8"))
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert sorted(functions) == ["__dir__", "__getattr__"]
    assert packages(ROOT / "halfstep" / "__init__.py") == {
        "__future__",
        "importlib",
        "typing",
        "loops",
        "scaler",
        "halfstep",
    }


def test_files_that_are_named_are_there():
    there = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("scaler", "loops", "halfstep", "tests")
        for path in (ROOT / folder).rglob("*")
    ]
    names = re.findall(r"`([\w/]+(?:/|\.py))", TEXT)
    assert len(names) > 20
    assert [name for name in names if not any(path.endswith(f"/{name.rstrip('/')}") for path in there)] == []
