"""How real the simulated telemetry is: distances to published real recordings, as docs/realism.md and its pictures.

    python -m benchmarks.realism --data DIR [--overlay DIR] [--seed 7] [--page FILE] [--images DIR] [--scenarios DIR]

DIR holds the real recordings, which are not part of the project: the page and the committed pictures
show distances alone. --overlay draws both curves over each other, into a folder outside the project.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agents.sim.physics.jobs import WARM_UP
from agents.sim.scenario import Scenario
from agents.sim.scenario_file import load
from benchmarks.realism.page import CLOSE, FIGURES, OFF, WIDTH, page
from benchmarks.realism.quantities import QUANTITIES, Compared, compare
from benchmarks.realism.real import A100_W, RATED_W, Real
from benchmarks.realism.simulated import BOARD_W, BUSY, FULL, ROOT, SCENARIOS, SERVER_W, Simulated, simulate
from pipeline.model.errors import UsageError

SEED = 7


def main(words: Sequence[str] | None = None) -> int:
    asked = _arguments(words)
    try:
        _run(asked)
    except UsageError as error:
        sys.stderr.write(f"realism: {error}\n")
        return 2
    return 0


def _run(asked: argparse.Namespace) -> None:
    real = Real(asked.data)
    if asked.overlay and asked.overlay.resolve().is_relative_to(ROOT):
        raise UsageError(f"--overlay {asked.overlay}: is inside the project, where real data must not go")
    try:
        from benchmarks.realism import plots
    except ImportError as error:
        raise UsageError(f"{error.name}: not installed; expected the group docs: pip install --group docs") from error
    with tempfile.TemporaryDirectory() as folder:
        simulate(asked.scenarios, asked.seed, Path(folder))
        simulated = Simulated(Path(folder))
        found = [_as_line(compare(quantity, real, simulated)) for quantity in QUANTITIES]
    for figure in FIGURES:
        plots.overview([one for one in found if one.quantity.figure == figure], asked.images / f"realism-{figure}.png")
    if asked.overlay:
        for one in found:
            plots.overlay(one, asked.overlay / f"{one.quantity.name}.png")
    asked.page.write_text(page(found, _settings(asked, real)))
    print(asked.page)


def _settings(asked: argparse.Namespace, real: Real) -> dict[str, str]:
    """Returns numbers of the page that are not distances: sizes of the simulations, and constants of the comparison."""
    names, _, stages = real.steps
    constants = {"a100": A100_W, "h100": BOARD_W, "dgx_a100": RATED_W, "dgx_h100": SERVER_W, "busy": BUSY}
    constants |= {
        "close": CLOSE,
        "off": OFF,
        "width": WIDTH,
        "full": FULL,
        "warm": WARM_UP,
        "ranks_real": len(names),
        "stages_real": len(set(stages.values())),
    }
    constants_text = {name: f"{value:g}" for name, value in constants.items()}
    for name in SCENARIOS:
        one = load(asked.scenarios / f"{name}.toml")
        size = f"{one.fleet.nodes} nodes, {one.fleet.nodes * one.fleet.gpus_per_node} GPUs"
        constants_text[name] = f"{size}, {one.duration / 3600:g} h, every {one.interval:g} s{_life(one)}"
    return {**constants_text, "seed": str(asked.seed)}


def _life(scenario: Scenario) -> str:
    """What happens in it by itself."""
    jobs = f"; jobs of {scenario.jobs.mean_hours:g} h on the mean" if scenario.jobs.mean_hours else ""
    factors = scenario.rates.faults, scenario.rates.confounders
    rates = "; faults and benign events at {:g} and {:g} times the published rates".format(*factors)
    return jobs + (rates if any(factors) else "")


def _as_line(found: Compared) -> Compared:
    sys.stderr.write(f"realism: {found.quantity.name}\n")
    return found


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.realism", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="the real recordings; see docs/realism.md")
    parser.add_argument("--overlay", type=Path, help="a folder outside the project for pictures with real curves")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "realism.md")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument(
        "--scenarios", type=Path, default=Path(__file__).parent, help="hall.toml, weeks.toml, second.toml"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
