"""The fingerprint of the code that determines findings: a result of other code does not count.

Covered is what the run of a scenario (judge.py) imports, directly or not. Comments and docstrings are not: a
certification takes hours, and words change more often than code.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
_RUN = "benchmarks/detection/judge.py"


def fingerprint(root: Path = ROOT) -> str:
    """Returns the fingerprint of the code that determines the findings of a scenario, and of NumPy's version."""
    digest = hashlib.sha256(np.__version__.encode())
    for path in sorted(_reached(root)):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + _code_of(path.read_text()).encode())
    return digest.hexdigest()[:16]


def _reached(root: Path) -> set[Path]:
    """Returns the file that runs a scenario, and all of the project that it imports, directly or not."""
    waiting, found = [root / _RUN], set[Path]()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += (p for name in _imports(ast.parse(path.read_text())) for p in _files_of(root, name))
    return found


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yields the dotted names that a module imports, with each name taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files_of(root: Path, name: str) -> Iterator[Path]:
    """Yields the files that are run when a dotted name is imported: its packages, and the module."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        base = root.joinpath(*parts[:number])
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                yield path


def _code_of(source: str) -> str:
    """Returns a source without comments, docstrings and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return "\n".join(kept for line in lines if (kept := line.rstrip()))
