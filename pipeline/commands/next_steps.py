"""What `fleetpulse doctor` ends with: what to do next; and its wait until nothing fails, as a gate for upgrades."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from pipeline.commands.checks import Check
from pipeline.commands.installed import is_node
from pipeline.config.sections import Config
from pipeline.runtime import systemd

SHOWN = 3
"""Steps that are named; more confuse. Chosen."""
AS_ROOT = "sudo fleetpulse doctor"
GATE = "FLEETPULSE_GATE"
"""Variable of the environment with which a round of `doctor --wait` knows that it is one."""
STARTING = "is starting"
"""What the check of the agent finds of one that has not yet read anything."""
PAUSE_S = 2.0
"""Between two rounds of `doctor --wait` (s). Chosen: a round takes about one."""


def suggest_next(config: Config, checks: Sequence[Check]) -> list[str]:
    """Returns the lines below the checks: fixes of causes, of what fails, of what warns; else what a sound host does
    next."""
    fixes: dict[str, str] = {}  # one step may mend several checks
    wrong = [check for state in ("fail", "warn") for check in checks if check.state == state]
    for check in sorted(wrong, key=lambda check: not check.is_cause):
        if check.fix:
            fixes.setdefault(check.fix, check.name)
    steps = [f"{name}: {fix}" for fix, name in fixes.items()]
    failed = sum(check.state == "fail" for check in checks)
    if failed and lacks_rights():
        return [f"Next: run it as root, since this user may not read what the services read: {AS_ROOT}"]
    if steps:
        head = (
            "Next: correct what fails, then run fleetpulse doctor again" if failed else "Next: nothing fails; improve"
        )
        more = [f"    and {len(steps) - SHOWN} more above"] if len(steps) > SHOWN else []
        return [head, *(f"    {number}. {step}" for number, step in enumerate(steps[:SHOWN], 1)), *more]
    if failed:
        return ["Next: read the checks above that fail"]
    if config.source == "defaults":
        return ["Next: every check passed with defaults; for a site: fleetpulse setup"]
    address = config.notify.external_url or f"http://{config.dashboard.host}:{config.dashboard.port}"
    return [f"Next: every check passed; the dashboard is {address}"]


def lacks_rights() -> bool:
    """Returns whether services of units have state and secrets here that this user may not read."""
    return os.geteuid() != 0 and any(map(systemd.has_unit, ("agent", "pipeline")))


def is_gate() -> bool:
    """Returns whether this is a round of `doctor --wait`."""
    return GATE in os.environ


def check_gate(config: Config, checks: Sequence[Check]) -> list[Check]:
    """Returns a failed check if what a gate waits for does not run here, and nothing says so; else none.

    Without a unit nothing says that a pipeline or an agent should run, so that its absence is no failure of `doctor`;
    a gate that passes then has tested nothing. Over spools the pipeline is on this host; with Kafka either counts.
    """
    if any(check.state == "fail" for check in checks):
        return []
    runs = {check.name for check in checks if check.state == "ok" and check.found != STARTING}
    needs = {"api", "agent"} if is_node() or config.pipeline.transport == "kafka" else {"api"}
    if runs & needs:
        return []
    what = "no agent" if is_node() else "no pipeline" if needs == {"api"} else "neither a pipeline nor an agent"
    found = f"{what} runs here yet"
    return [Check("gate", "fail", found, "--wait would have tested nothing", "start it; without one: no --wait")]


def wait_until_sound(
    command: Sequence[str],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> int:
    """Runs `doctor` until it succeeds, at most `seconds`; prints the last result and returns its exit code.

    Each round is a separate process: collectors are forked, which must happen before other checks start threads.
    """
    end = monotonic() + seconds
    while True:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, GATE: "1"})
        if done.returncode in (0, 2) or monotonic() + PAUSE_S >= end:
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
            return done.returncode
        sleep(PAUSE_S)
