"""The house rules of docs/architecture.md: imports point one way, no cycles, files of one sitting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ORDER = (
    "errors",
    "checks",
    "snapshot",
    "noted",
    "forks",
    "files",
    "cache",
    "sources",
    "building",
    "compiled",
    "_torch",
    "_dynamo",
    "_opacus",
    "memory",
    "waiting",
    "overrides",
    "graph",
    "losses",
    "ops",  # backends announce themselves to ops.dispatch, which names them in strings only
    "clipping",
    "noise",
    "host",
    "kernels",
    "cuda",
    "planner",
    "parallel",
    "accounting",
    "trace",
    "data",
    "counts",
    "samples",
    "layers",
    "uses",
    "backward",
    "model",
    "optim",
    "explanation",
    "mechanism",
    "inspection",
    "captured",
    "engine",
    "opacus",
    "monitor",
    "audit",
    "fairness",
    "integrations",
    "testing",
    "doctor",
    "fastclip",
)
"""Folders, and modules that lie in none, lowest first: each imports from what stands before it."""

COMPILED = {"fastclip._C", "fastclip._host", "fastclip._path", "fastclip._step"}
"""Built from csrc/, where no module of ours is seen."""

CYCLES = {
    # A derived value says in an annotation what it came from.
    ("uses.derived", "uses.proxy"),
    # What a rule and a gradient state see of a use is said in annotations, too.
    ("uses.keeper", "uses.rule", "uses.tap"),
}
"""Modules that import each other; none may be added."""

LONGEST = 700
"""Lines of a module, at most."""


def modules() -> dict[str, Path]:
    """The modules of the package by their names."""
    found = {}
    for path in sorted((ROOT / "fastclip").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(source: str, known: Iterable[str]) -> Iterator[str]:
    """What of fastclip a module imports: at its top, in a function, or for annotations alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "write imports in full"
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in deeper]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "fastclip")


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What each module imports."""
    known = {*MODULES, *COMPILED}
    found = {name: set(imports(path.read_text(), known)) for name, path in MODULES.items()}
    return {name: others - COMPILED for name, others in found.items()}


def place(module: str) -> str:
    """The folder of a module, or itself."""
    return module.split(".")[1] if "." in module else module


def cycles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [*graph[start]]
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += graph.get(name, ())
        return seen

    below = {name: reached(name) for name in graph}
    return {
        tuple(sorted(other for other in below if other in below[name] and name in below[other]))
        for name in graph
        if name in below[name]
    }


def test_every_kind_of_import_is_seen() -> None:
    source = (
        "import fastclip.ops\n"
        "from fastclip import engine, __version__\n"
        "if TYPE_CHECKING:\n    from fastclip.engine.model import install\n"
        "def f():\n    from fastclip.data import draws\n    import torch\n"
    )
    known = {"fastclip.engine", "fastclip.data.draws"}
    expected = ["ops", "engine", "", "model.module", "data.draws"]
    assert sorted(imports(source, known)) == sorted(f"fastclip.{n}".strip(".") for n in expected)


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert cycles(graph) == {("b", "c"), ("e",)}


def test_every_folder_has_its_place() -> None:
    assert sorted(ORDER) == sorted({place(name) for name in MODULES})


def test_imports_point_one_way(graph: dict[str, set[str]]) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if place(name) != place(other) and ORDER.index(place(name)) < ORDER.index(place(other))
    ]
    assert not wrong, wrong


def test_no_cycles(graph: dict[str, set[str]]) -> None:
    expected = {tuple(f"fastclip.{name}" for name in cycle) for cycle in CYCLES}
    assert cycles(graph) == expected


def test_modules_are_short() -> None:
    lines = {
        path.relative_to(ROOT / "fastclip").as_posix(): len(path.read_text().splitlines())
        for path in MODULES.values()
    }
    long = {name: n for name, n in lines.items() if n > LONGEST}
    assert not long, f"split them: {long}"


# docs/architecture.md

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def defined(path: Path) -> set[str]:
    """Functions, classes and their methods that a file defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            inside = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{n.name}" for n in inside if isinstance(n, ast.FunctionDef)}
    return found


def test_the_page_has_every_folder_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)/?` \|", PAGE, re.MULTILINE)
    assert rows == [name for name in ORDER if name != "fastclip"]


@pytest.mark.parametrize(
    ("file", "name"), sorted(set(re.findall(r"`([\w/]+\.py)` `([\w.]+)`", PAGE)))
)
def test_the_page_names_what_is_there(file: str, name: str) -> None:
    assert name in defined(ROOT / "fastclip" / file)


def test_the_page_names_no_class_that_is_not_there() -> None:
    """A method that follows its class's file, further on in the line."""
    known = set().union(*(defined(path) for path in MODULES.values()))
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE))
    assert named <= known, named - known
