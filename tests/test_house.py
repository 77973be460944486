"""The source tree: allowed imports, light packages, lengths, style and types."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agents", "pipeline", "detectors", "dashboards")
HEAVY = ("duckdb", "pyarrow", "pandas", "streamlit", "fastapi", "numba", "torch")
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "misc", "base", "core"}
FILE_LINES = 500  # about 150 is good; at 300 check whether it is one subject
FUNCTION_LINES = 40
LONG_FILES: Mapping[str, str] = {}
LONG_FUNCTIONS: Mapping[str, str] = {}


@cache
def sources() -> list[Path]:
    return [ROOT / "fleetpulse.py", *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))]


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_tool(*words: str) -> tuple[int, str]:
    """Runs a tool of this interpreter's environment in the root: (exit status, output)."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    ran = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environ, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def modules_loaded_by(program: str) -> set[str]:
    """Returns the top-level modules that are loaded after a program ran in a fresh interpreter."""
    tail = "\nimport sys, json; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", program + tail], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))


def test_every_import_contract_of_pyproject_holds() -> None:
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_only_the_entry_point_joins_packages() -> None:
    """No package may import the entry point either."""
    guests = [name_of(p) for p in sources()[1:] if any(m == "fleetpulse" for m in imported(p))]
    assert guests == []


def test_ruff_finds_nothing() -> None:
    status, said = run_tool("ruff", "check", ".")
    assert status == 0, said


def test_every_file_is_formatted() -> None:
    status, said = run_tool("ruff", "format", "--check", ".")
    assert status == 0, said


@pytest.mark.timeout(1200)  # with a cold cache, beside other tests
def test_mypy_is_content_with_all_four_packages_and_the_door() -> None:
    status, said = run_tool("mypy")
    assert status == 0, said


def test_every_file_is_short_enough_or_listed_with_a_reason() -> None:
    lines = {name_of(path): text_of(path).count("\n") for path in sources()}
    short_again = [name for name in LONG_FILES if lines[name] <= FILE_LINES]
    assert short_again == [], "remove these from LONG_FILES"
    long = {name: count for name, count in lines.items() if count > FILE_LINES and name not in LONG_FILES}
    assert long == {}, f"wanted at most {FILE_LINES} lines: is each of these one subject?"


def test_every_function_is_short_enough() -> None:
    long = [
        f"{name_of(path)}:{function.lineno} {function.name} has {length(function)} lines"
        for path in sources()
        for function in functions(path)
        if length(function) > FUNCTION_LINES and f"{name_of(path)}:{function.name}" not in LONG_FUNCTIONS
    ]
    assert long == [], f"wanted at most {FUNCTION_LINES}"


def test_every_module_has_a_docstring() -> None:
    silent = [p for p in sources() if text_of(p).strip() and ast.get_docstring(tree_of(p)) is None]
    assert [name_of(p) for p in silent] == [], "expected a docstring whose first line is a statement"


def test_no_module_has_a_meaningless_name() -> None:
    assert [name_of(path) for path in sources() if path.stem in FORBIDDEN_NAMES] == []


def test_no_todo_marks_are_left() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    undone = [f"{name_of(p)}: {mark}" for p in sources() for mark in marks if mark in text_of(p)]
    assert undone == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): path for path in sources()}
    edges = {m: {target(name, modules) for name in imported(path)} - {None, m} for m, path in modules.items()}
    while leaves := [module for module, needs in edges.items() if not needs]:
        for leaf in leaves:
            del edges[leaf]
        for needs in edges.values():
            needs.difference_update(leaves)
    assert edges == {}, "these modules cannot be put in order"


def test_help_loads_nothing_but_the_standard_library() -> None:
    program = (
        "import contextlib, io, fleetpulse\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): fleetpulse.main(['--help'])"
    )
    foreign = modules_loaded_by(program) - set(sys.stdlib_module_names) - modules_loaded_by("")
    assert foreign == {"fleetpulse", "pipeline"}  # of pipeline, only the table of arguments


def test_loading_all_of_agents_loads_nothing_heavy() -> None:
    program = (
        "import agents, importlib, pkgutil\n"
        "for m in pkgutil.walk_packages(agents.__path__, 'agents.'): importlib.import_module(m.name)"
    )
    assert modules_loaded_by(program) & set(HEAVY) == set()


def test_the_top_level_contains_only_the_files_of_the_design() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:  # an unpacked archive has no index to ask
        return
    top = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    plain = {name for name in top if not name.startswith(".")}
    assert plain <= {
        *PACKAGES,
        *("tests", "docs", "deploy", "benchmarks", "docker-compose.yml", "pyproject.toml", "constraints.txt"),
        *("fleetpulse.py", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md"),
    }


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in statements(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the lines of a function without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    text = function.body[0]
    return lines - ((text.end_lineno or text.lineno) - text.lineno + 1)


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imported(path: Path) -> set[str]:
    """Returns the names that a file imports when it is loaded; `from a import b` may mean a.b or a name in a."""
    names: set[str] = set()
    for node in statements(tree_of(path), runs_at_load):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def runs_at_load(statement: ast.AST) -> bool:
    """Returns whether the inside of a statement runs when its file is loaded: not in functions or for types alone."""
    if isinstance(statement, ast.If):
        return "TYPE_CHECKING" not in ast.unparse(statement.test)
    return not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))


def statements(node: ast.AST, enters: Callable[[ast.AST], bool] = lambda _: True) -> Iterator[ast.AST]:
    """Yields all statements of a file in order; expressions, nine of ten nodes, hold no statement."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)) and enters(child):
            yield child
            yield from statements(child, enters)


def target(name: str, modules: Mapping[str, Path]) -> str | None:
    """Returns our module that an imported name means, if it is one."""
    return next((n for n in (name, name.rpartition(".")[0]) if n in modules), None)
