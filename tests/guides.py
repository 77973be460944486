"""Which guides the messages of the product name, and whether the pages that a package has hold together."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path

PACKAGES = ("agents", "pipeline", "detectors", "dashboards")
SPELLED = re.compile(r"docs/\w+\.md")
PRINT = "import sys\nfrom pipeline.runtime.guides import guide\nfor name in sys.argv[1:]: print(guide(name))"


@cache
def find_named(root: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns (page, section) of each call of `guide`, and places of texts that name docs/*.md without it."""
    named, spelled_out = set(), []
    for path in [root / "fleetpulse.py", *(path for name in PACKAGES for path in sorted((root / name).rglob("*.py")))]:
        tree = ast.parse(path.read_text())
        comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "guide":
                words = [ast.literal_eval(word) for word in node.args]
                named.add((words[0], words[1] if len(words) > 1 else ""))
            elif isinstance(node, ast.Constant) and id(node) not in comments and SPELLED.search(str(node.value)):
                spelled_out.append(f"{path.relative_to(root)}:{node.lineno}")
    return sorted(named), spelled_out


def print_named(python: Path | str, site: Path | None = None) -> str:
    """Returns what an installation says of the place of each guide that messages name, one a line."""
    pages = sorted({page for page, _ in find_named(Path(__file__).parents[1])[0]})
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"PYTHONPATH": str(site)} if site else {}
    done = subprocess.run([python, "-P", "-c", PRINT, *pages], env=environ, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def list_printed(text: str) -> list[str]:
    """Returns the paths of guides in what a command printed."""
    return sorted(set(re.findall(r"[^\s\"'()]*docs/\w+\.md", text)))


def find_broken_links(folder: Path) -> list[str]:
    """Returns the links of all pages below a folder that lead to no file of it."""
    pages = list(folder.rglob("*.md"))
    assert len(pages) > 40
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())]
    inside = folder.resolve()
    return [
        f"{page.name}: {link}"
        for page, link in links
        if "://" not in link and not ((to := (page.parent / link).resolve()).is_file() and to.is_relative_to(inside))
    ]
