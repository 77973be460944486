"""Writes docs/acts_log.md: what acts did at real schedulers, scene by scene, from their histories.

    python -m benchmarks.acts_log [--only slurm|slurm24|slurmrestd|kubernetes] [--print]

Each scene is asserted while it is played (tests/pipeline/act_labs.py), so that a log that is written is one that
passed. Needs root and the parts of `make parts`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.pipeline.act_labs import LABS, Play, Scene
from tests.pipeline.api.test_api_acts import Served

PAGE = Path(__file__).parents[1] / "docs" / "acts_log.md"
HEAD = """# Acts at real schedulers: logs

What acts did at Slurm 22.05 and 24.11 by their commands, Slurm 24.11 by slurmrestd, and Kubernetes 1.35, from their
histories as `fleetpulse act show` prints them. Written by `python -m benchmarks.acts_log`, which plays each scene at
the real scheduler and stops if one differs from [acts.md](acts.md). alice proposes, bob approves.
"""


def play_all(name: str) -> tuple[str, list[Scene]]:
    """Returns the name of a lab and its scenes."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        at = Path(folder)
        (at / "lab").mkdir()
        with LABS[name](at / "lab") as lab:
            served = Served(at, patch)  # type: ignore[no-untyped-call]
            try:
                play = Play(lab, served, at)
                node = [play.play_dead_node()] if lab.dead else []  # before SlurmdTimeout
                dead = play.play_dead_scheduler()  # then: a scheduler may come back with its state of seconds ago
                scenes = [*play.play_hold_and_release(), *play.play_refused(), play.play_undone()]
                scenes += [*node, dead, play.play_killed_executor()]
                return lab.title, [*scenes, *(play.play_reboot() if lab.start_node else [])]
            finally:
                served.close()  # type: ignore[no-untyped-call]


def write_scene(scene: Scene) -> str:
    """Returns a scene as Markdown: what happened, what the scheduler shows, and the history of the act."""
    shown = "\n".join(f"{when + ':':<20}{text}" for when, text in scene.shown)
    rows = "\n".join(
        f"| {number} | {state.replace('_', ' ')} | {who} | {_cell(said)} |"
        for number, (state, who, said) in enumerate(scene.steps, 1)
    )
    table = f"| step | state | who | comment |\n|---|---|---|---|\n{rows}"
    return f"### {scene.title}\n\n{scene.text}\n\n{table}\n\n```text\n{shown}\n```\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ") or "-"


def write_page(labs: Iterable[tuple[str, list[Scene]]]) -> str:
    """Returns the whole page."""
    parts = [f"## {title}\n\n" + "\n".join(map(write_scene, scenes)) for title, scenes in labs]
    return "\n".join([HEAD, *parts])


def main() -> int:
    """Plays the scenes, and writes or prints the page."""
    parser = argparse.ArgumentParser(prog="benchmarks.acts_log", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=LABS)
    parser.add_argument("--print", action="store_true", dest="shows", help="do not write docs/acts_log.md")
    given = parser.parse_args()
    text = write_page([play_all(name) for name in ([given.only] if given.only else LABS)])
    if given.shows or given.only:
        print(text)
    else:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
