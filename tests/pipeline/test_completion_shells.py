"""Completion as zsh and fish execute it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.commands.completion import make_script
from tests.parts import do_without

pytestmark = pytest.mark.shells
LINES = [
    (("inc",), {"incidents"}),
    (("silences", "e"), {"edit", "extend", "expire"}),
    (("silences", "add", "--re"), {"--reason"}),
    (("token", "create", "ann", "--role", "v"), {"viewer"}),
    (("topology", "ch"), {"check"}),
    (("ack", "inc-"), {"inc-a1", "inc-b2"}),
    (("reopen", "inc-"), {"inc-old"}),
    (("incidents", "show", "inc-"), {"inc-a1", "inc-b2"}),
]
_STUB = """#!/bin/sh
[ "$2" = incidents ] && printf 'inc-a1\\tGPU 3: hot\\ninc-b2\\tx\\n'
[ "$2" = resolved ] && printf 'inc-old\\tx\\n'
"""
_ZSH = """
autoload -Uz compinit && compinit -u -d {folder}/dump
source {folder}/complete
emulate -L sh; setopt kshglob noshglob braceexpand
COMP_WORDS=({words}); COMP_CWORD={place}; _fleetpulse
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
"""The last three lines are what zsh's own bashcompinit does at a key."""


def run_shell(shell: str, script: str, folder: Path) -> set[str]:
    """Returns the first word of each line that a shell prints, without files of the user."""
    path = shutil.which(shell)
    if path is None:
        do_without("shells", f"no {shell}: run 'make parts'")
    (folder / "complete").write_text(make_script(shell))
    (folder / "fleetpulse").write_text(_STUB)
    (folder / "fleetpulse").chmod(0o755)
    options = ["-f"] if shell == "zsh" else ["--no-config"]
    home = {
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "XDG_DATA_HOME": str(folder),
        "PATH": f"{folder}:/usr/bin:/bin",
    }
    ran = subprocess.run([path, *options, "-c", script], capture_output=True, text=True, env=home, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    return {line.split()[0] for line in ran.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize(("line", "wanted"), LINES)
def test_zsh_completes_with_the_script(tmp_path: Path, line: tuple[str, ...], wanted: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in ("fleetpulse", *line))
    found = run_shell("zsh", _ZSH.format(folder=tmp_path, words=words, place=len(line)), tmp_path)
    assert {word for word in found if word.startswith(line[-1])} == wanted  # zsh itself filters what it is given


@pytest.mark.parametrize(("line", "wanted"), LINES)
def test_fish_completes_with_the_script(tmp_path: Path, line: tuple[str, ...], wanted: set[str]) -> None:
    script = f"source {tmp_path}/complete; complete -C 'fleetpulse {' '.join(line)}'"
    found = run_shell("fish", script, tmp_path)
    assert wanted <= found
    assert all(word.startswith(line[-1]) for word in found)
