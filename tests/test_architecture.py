"""The rules of docs/architecture.md: who may import whom, no circles, sizes of files and functions."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "errors": "",
    "core": "errors",
    "losses": "errors",
    "_moved": "errors",
    "clipping": "core",
    "trace": "core",
    "ops": "clipping",  # loads host, cuda and triton by name, in ops.dispatch alone
    "distributed": "ops",
    "accounting": "distributed",
    "samples": "distributed trace",
    "plan": "accounting",
    "data": "accounting trace _moved",
    "rules": "samples",
    "counts": "data",
    "backward": "data rules",
    "engine": "backward counts _moved",
    "fairness": "counts",
    "opacus": "engine",
    "monitor": "engine",
    "audit": "engine",
    "integrations": "engine",
    "testing": "engine",
    "doctor": "engine",
    "fastclip": "engine losses",
}
"""Folders, and modules that lie in none, lowest first: each may import these, and what these may."""
LOADED_LATER = {"fastclip._C", "fastclip._host", "fastclip._path", "fastclip._step"}
"""Built from csrc/, where no module of ours is seen."""

LIMITS = {
    "folders": 24, "floors": 10, "imports between folders": 115, "circles": 0, "files": 233,
    "files under 100 lines": 25, "lines of a file": 700, "modules of a folder": 18,
    "lines of a function": 60,
}  # fmt: skip
"""What may not be exceeded; lower a number when the figure has become lower."""


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
    known = {*MODULES, *LOADED_LATER}
    found = {name: set(imports(path.read_text(), known)) for name, path in MODULES.items()}
    return {name: others - LOADED_LATER for name, others in found.items()}


def folder(module: str) -> str:
    """The folder of a module, or itself."""
    return module.split(".")[1] if "." in module else module


def reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """All that can be reached from here by one import or more."""
    seen: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += graph.get(name, ())
    return seen


def circles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of modules that reach each other."""
    below = {name: reached(graph, name) for name in graph}
    return {
        tuple(sorted(other for other in below if other in below[name] and name in below[other]))
        for name in graph
        if name in below[name]
    }


ALLOWED = {name: others.split() for name, others in MAY_IMPORT.items()}


def floor(name: str) -> int:
    """One more than the highest floor that it may import from."""
    return 1 + max(map(floor, ALLOWED[name]), default=0)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = node.body[ast.get_docstring(node) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def figures(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """What LIMITS limits, as it is."""
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    between = {(folder(a), folder(b)) for a, others in graph.items() for b in others}
    of_ours = {name: n for name, n in lines.items() if folder(name) != "opacus"}
    kernels = "fastclip.ops.triton"
    functions = [
        body_lines(node)
        for name, path in MODULES.items() if not name.startswith(kernels)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]  # fmt: skip
    in_folder = Counter(
        path.parent for path in MODULES.values() if path.name not in ("__init__.py", "__main__.py")
    )
    return {
        "folders": len({folder(name) for name in MODULES}), "floors": max(map(floor, ALLOWED)),
        "imports between folders": sum(a != b for a, b in between), "circles": len(circles(graph)),
        "files": len(lines), "files under 100 lines": sum(n < 100 for n in of_ours.values()),
        "lines of a file": max(lines.values()), "modules of a folder": max(in_folder.values()),
        "lines of a function": max(functions),
    }  # fmt: skip


def test_every_kind_of_import_is_seen() -> None:
    source = (
        "import fastclip.ops\n"
        "from fastclip import engine, __version__\n"
        "if TYPE_CHECKING:\n    from fastclip.engine.model import install\n"
        "def f():\n    from fastclip.data import draws\n    import torch\n"
    )
    known = {"fastclip.engine", "fastclip.data.draws"}
    expected = ["ops", "engine", "", "engine.model", "data.draws"]
    assert sorted(imports(source, known)) == sorted(f"fastclip.{n}".strip(".") for n in expected)


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="in full"):
        list(imports("from . import engine\n", ()))


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(graph) == {("b", "c"), ("e",)}


def test_lines_of_a_body() -> None:
    (node,) = ast.parse(
        'def f():\n    """One.\n\n    Two.\n    """\n    x = 1\n\n    return x\n'
    ).body
    assert isinstance(node, ast.FunctionDef)
    assert body_lines(node) == 3


def test_every_folder_has_its_place() -> None:
    assert sorted(MAY_IMPORT) == sorted({folder(name) for name in MODULES})


def test_who_imports_whom(graph: dict[str, set[str]]) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if folder(name) != folder(other)
        and folder(other) not in reached(ALLOWED, folder(name))
    ]  # fmt: skip
    assert not wrong, wrong


def test_no_circles(graph: dict[str, set[str]]) -> None:
    assert circles(graph) == set()


@pytest.mark.parametrize("figure", LIMITS)
def test_sizes(figure: str, graph: dict[str, set[str]]) -> None:
    found = figures(graph)[figure]
    assert found <= LIMITS[figure], f"{figure}: {found}"


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
    rows = re.findall(r"^\| (\d+) \| `(\w+)/?` \|", PAGE, re.MULTILINE)
    assert [name for _, name in rows] == [name for name in MAY_IMPORT if name != "fastclip"]
    assert {name: int(n) for n, name in rows} == {name: floor(name) for _, name in rows}


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


if __name__ == "__main__":  # the figures as they are: python -m tests.test_architecture
    every = {*MODULES, *LOADED_LATER}
    found = {name: set(imports(path.read_text(), every)) for name, path in MODULES.items()}
    for figure, value in figures({n: others - LOADED_LATER for n, others in found.items()}).items():
        print(f"{figure}: {value} (at most {LIMITS[figure]})")
    lines = Counter()
    for name, path in MODULES.items():
        lines[folder(name)] += len(path.read_text().splitlines())
    print({name: lines[name] for name in MAY_IMPORT}, sum(lines.values()))
