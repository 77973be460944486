"""Prints what an extra of pyproject.toml requires, and what builds the project: python3 deploy/requirements.py EXTRA...

pip checks hashes only of requirements with a name: a folder such as '.[agent]' has none, so the project itself is
installed afterwards, without its dependencies.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> set[str]:
    """The requirements of the project and of some of its extras, those that they name in turn included."""
    found = set(project["dependencies"])
    for extra in extras:
        for one in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", one)
            found |= requirements(project, own[1].split(",")) if own else {one}
    return found


def read_project() -> dict:
    """The table [project] of pyproject.toml."""
    return tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


if __name__ == "__main__":
    build = Path(__file__).with_name("build.txt").read_text().splitlines()
    wanted = requirements(read_project(), sys.argv[1:]) | {line for line in build if not line.startswith("#")}
    print("\n".join(sorted(wanted)))
