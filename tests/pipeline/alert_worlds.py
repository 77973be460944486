"""Random worlds of alerts: what happens to incidents, receivers and the configuration, and whether alerts stay right.

    python -m tests.pipeline.alert_worlds --seeds 0:64 --acts 40 --mode routes
    python -m tests.pipeline.alert_worlds --trace 7 --mode routes          acts, history and messages of one world
    python -m tests.pipeline.alert_worlds --shrink 7 --mode routes         the fewest acts that show the same

`fixed` keeps one configuration for a whole world; `routes` also starts again with others.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.incidents.storms import STORM
from pipeline.store.database import Database
from tests.pipeline.alert_oracle import Oracle, Violation
from tests.pipeline.alert_receivers import Inbox
from tests.pipeline.alert_settings import NAMES, Setting, change_setting, draw_setting
from tests.pipeline.alert_site import Killed, WorldSite

Mode = Literal["fixed", "routes"]
Act = tuple[Any, ...]
DEVICES = ("gpu:n0.0", "gpu:n0.1", "gpu:n1.0", "gpu:n3.0", "gpu:n3.1", "gpu:n6.0")
SOURCES = ("cdu:c0", "cdu:c1")
MORE = ("gpu:n1.1", "gpu:n2.0", "gpu:n2.1", "gpu:n4.0", "gpu:n4.1", "gpu:n5.0")
SILENCES = ('rack="r0"', 'rack="r1"', "detector=hot", 'cause="gpu:n0.0"', "detector=coolant", 'severity="warning"')
_WEIGHTS = {
    "open": 16,
    "source": 8,
    "end": 14,
    "end_source": 5,
    "reopen": 4,
    "severity": 5,
    "blame": 4,
    "acknowledge": 7,
    "silence": 4,
    "expire": 3,
    "merge": 2,
    "storm": 1,
    "seconds": 12,
    "minutes": 12,
    "hours": 2,
    "away": 5,
    "back": 4,
    "restart": 3,
    "kill": 2,
    "settle": 3,
}


@dataclass(frozen=True)
class World:
    """What happens in a world. storm_pages: as [incidents] storm_pages."""

    setting: Setting
    storm_pages: int
    acts: tuple[Act, ...]


def make_world(seed: int, number: int, mode: Mode) -> World:
    """Returns the world of a seed."""
    chance = random.Random(f"{seed} {mode}")
    setting = draw_setting(chance)
    storm_pages = chance.choice((3, 20, 20))
    weights = {**_WEIGHTS, **({"configure": 7} if mode == "routes" else {})}
    devices = DEVICES[: chance.choice((2, 3, len(DEVICES)))]  # with few of them more happens to each
    if mode == "fixed":  # nothing but groups, inhibition and time: more of these
        setting = replace(setting, rules=chance.choice(("rack", "rack", "all", "node", "none")))
        weights |= {"source": 12, "seconds": 18, "minutes": 20, "silence": 2, "merge": 1}
    acts, now, opened = list[Act](), setting, list[str]()
    for _ in range(number):
        act = draw_act(chance, chance.choices(list(weights), list(weights.values()))[0], now, devices, opened)
        now = act[1] if act[0] == "configure" else now
        if act[0] in ("open", "reopen"):
            opened.append(act[1])
        elif act[0] == "end":
            opened = [one for one in opened if one != act[1]]
        acts.append(act)
    return World(setting, storm_pages, tuple(acts))


def draw_act(chance: random.Random, kind: str, setting: Setting, devices: Sequence[str], opened: Sequence[str]) -> Act:
    """Returns an act with what it is about, mostly one of those that are open. What does not apply when it runs does
    nothing."""
    source, name = chance.choice(SOURCES[: len(devices) - 1]), chance.choice(NAMES)
    anything = chance.choice((*devices, source))
    device = chance.choice(devices)
    either = chance.choice(opened) if opened and chance.random() < 0.85 else anything
    by_person, is_page = chance.random() < 0.5, chance.random() < 0.7
    drawn: dict[str, Act] = {
        "open": (device, "page" if is_page else "ticket", chance.choice(("hot", "hot", "xid"))),
        "source": (source, "page", "coolant"),
        "end": (either, by_person),
        "end_source": (source, by_person),
        "reopen": (anything, by_person),
        "severity": (either,),
        "blame": (either,),
        "acknowledge": (chance.choice((either, either, either, STORM)), chance.choice((None, None, 0.02, 0.3))),
        "silence": (chance.choice(SILENCES), chance.choice((30, 300, 5400))),
        "merge": (either, chance.choice(opened or devices)),
        "storm": (is_page,),
        "seconds": (chance.choice((0.5, 0.5, 1, 3, 12, 31)),),
        "minutes": (chance.choice((1, 2, 4)),),
        "hours": (chance.choice((0.4, 1, 2.1)),),
        "away": (name, chance.choice(("error", "closed", "lost"))),
        "back": (name,),
        "kill": (chance.randint(1, 6), by_person),
    }
    if kind == "configure":
        return ("configure", change_setting(setting, chance))
    if kind in ("end", "end_source"):
        return ("end", *drawn[kind])
    return ("open" if kind == "source" else kind, *drawn.get(kind, ()))


class Run:
    """A world that happens. quiet_rounds: rounds after an act by chance, as acts may be nearer than half a second."""

    def __init__(self, world: World, folder: Path, empty: Path, inboxes: dict[str, Inbox]) -> None:
        self.world, self.inboxes = world, inboxes
        urls = {name: inbox.url for name, inbox in inboxes.items()}
        for inbox in inboxes.values():
            inbox.mode = "up"
            inbox.read()
            inbox.refused.clear()
        self.site = WorldSite(folder, empty, urls, world.setting, world.storm_pages)
        self.oracle = Oracle(self.site, inboxes)

    def run(self) -> list[Violation]:
        """Does all acts, lets everything go, and returns the violations."""
        for number, act in enumerate(self.world.acts):
            self.oracle.act = number
            self.oracle.lines.append(f"{number:3} {describe_act(act)}")
            self.do(act)
            if number % 3 == 0:
                self.send_round()
        self.oracle.act = len(self.world.acts)
        self.oracle.lines.append("    settle")
        self.settle()
        self.finish()
        assert self.site.database is not None
        self.site.database.close()
        return list(self.oracle.violations.values())

    def do(self, act: Act) -> None:
        kind, *given = act
        site = self.site
        if kind == "open":
            site.open(given[0], severity=given[1], detector=given[2])
        elif kind == "severity":
            known = site.find(given[0])
            if known is not None:
                other: Any = {"page": "ticket", "ticket": "page"}[known.severity]
                site.change("severity_raised" if other == "page" else "updated", given[0], severity=other)
        elif kind == "storm":
            site.open(*MORE, severity="page" if given[0] else "ticket", detector="xid")
        elif kind in ("end", "reopen", "blame", "acknowledge", "merge"):
            getattr(site, kind)(*given)
        elif kind == "silence":
            site.add_silence(*given)
        elif kind == "expire":
            site.expire_silence()
        else:
            self._do_outside(kind, given)

    def _do_outside(self, kind: str, given: Sequence[Any]) -> None:
        """Time, receivers and the process."""
        if kind in ("seconds", "minutes", "hours"):
            total = given[0] * {"seconds": 1, "minutes": 60, "hours": 3600}[kind]
            self.pass_time(total, {"seconds": 6.0, "minutes": 20.0, "hours": 240.0}[kind])
        elif kind in ("away", "back"):
            self.set_mode(given[0], "up" if kind == "back" else given[1])
        elif kind == "restart":
            self._start()
        elif kind == "kill":
            self.site.store.left, self.site.store.before = given
            with contextlib.suppress(Killed):
                self.send_round()
            self._start()
        elif kind == "configure":
            self.site.setting = given[0]
            self._start()
            self.oracle.note_setting()
        elif kind == "settle":
            self.settle()

    def _start(self) -> None:
        self.site.start()
        self.oracle.note_start()

    def set_mode(self, name: str, mode: str) -> None:
        if self.inboxes[name].mode != mode:
            self.inboxes[name].mode = mode
            self.oracle.note_mode(name)

    def pass_time(self, total: float, step: float) -> None:
        """Lets time pass, with a round of each receiver in each step."""
        while total > 0:
            self.site.pass_time(min(step, total))
            self.send_round()
            total -= step

    def send_round(self) -> None:
        try:
            self.site.send_round()
        finally:
            self.oracle.read_inboxes()

    def settle(self, is_end: bool = False) -> None:
        """Receivers are back, and each gets its due messages; then the oracle judges."""
        for name in NAMES:
            self.set_mode(name, "up")
        self.pass_time(self.site.setting.patience_s + 30, 20.0)
        for _ in range(120):
            if not self.oracle.is_waiting():
                break
            self.pass_time(120, 60.0)
        self.oracle.check_quiet(is_end)

    def finish(self) -> None:
        """All removed receivers are configured again, all incidents end, and all groups may go."""
        if self.site.setting.removed:
            self.oracle.lines.append("    removed receivers are configured again")
            self._do_outside("configure", [replace(self.site.setting, removed=())])
            self.settle()
        self.oracle.lines.append("    all ends")
        for incident in self.site.list_open():
            if incident.detector != STORM:
                self.site.end(incident.entity, by_person=True)
        self.settle()
        self.pass_time(self.site.setting.repeat_s + 120, max(60.0, self.site.setting.repeat_s / 10))
        self.settle(is_end=True)


def describe_act(act: Act) -> str:
    return " ".join(one.describe() if isinstance(one, Setting) else str(one) for one in act)


# --- many of them -----------------------------------------------------------------------------------


@contextlib.contextmanager
def open_bench() -> Iterator[Any]:
    """Yields a function that runs a world; all of them share receivers and an empty store."""
    inboxes = {name: Inbox() for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.duckdb"
        Database(empty).close()

        def run(world: World) -> Run:
            with tempfile.TemporaryDirectory() as own:
                made = Run(world, Path(own), empty, inboxes)
                made.run()
                return made

        try:
            yield run
        finally:
            for inbox in inboxes.values():
                inbox.close()


def find_rules(run: Any, world: World) -> set[str]:
    return {one.rule for one in run(world).oracle.violations.values()}


def shrink(run: Any, world: World, rule: str) -> World:
    """Returns a world with as few acts as still break the rule."""
    size = max(1, len(world.acts) // 2)
    while size:
        at = 0
        while at < len(world.acts):
            fewer = replace(world, acts=world.acts[:at] + world.acts[at + size :])
            if rule in find_rules(run, fewer):
                world = fewer
            else:
                at += size
        size //= 2
    return world


def write_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def write_world(made: Run) -> None:
    write_lines(f"    {made.world.setting.describe()} storm_pages={made.world.storm_pages}")
    write_lines(*made.oracle.lines, *map(str, made.oracle.violations.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a world has a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:64", help="FIRST:END")
    parser.add_argument("--acts", type=int, default=40)
    parser.add_argument("--mode", choices=("fixed", "routes"), default="fixed")
    parser.add_argument("--trace", type=int, help="print one world")
    parser.add_argument("--shrink", type=int, help="print one world with the fewest acts")
    parser.add_argument("--strict", action="store_true", help="also violations that are documented")
    parser.add_argument("--examples", action="store_true", help="run the worlds of alert_examples")
    parser.add_argument("--rule", default="", help="which violation to keep; default: the first")
    given = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # receivers fail on purpose
    with open_bench() as run:
        if given.examples:
            return run_examples(run)
        one = given.trace if given.trace is not None else given.shrink
        if one is not None:
            made = run(make_world(one, given.acts, given.mode))
            found = find_faults(made)
            if given.shrink is not None and found:
                rule = next((v.rule for v in found if given.rule in v.rule), found[0].rule)
                made = run(shrink(run, made.world, rule))
            write_world(made)
            return int(bool(found))
        return run_seeds(run, range(*map(int, given.seeds.split(":"))), given.acts, given.mode, given.strict)


def find_faults(made: Run) -> list[Violation]:
    """Returns the violations, without the documented ones."""
    return [one for one in made.oracle.violations.values() if not one.rule.startswith("documented")]


def run_examples(run: Any) -> int:
    from tests.pipeline.alert_examples import EXAMPLES  # they are made of this module's worlds

    bad = 0
    for name, world in EXAMPLES.items():
        found = find_faults(run(world))
        bad += bool(found)
        write_lines(f"{'wrong' if found else 'right'}: {name}", *(f"    {one}" for one in found))
    return int(bad > 0)


def run_seeds(run: Any, seeds: range, acts: int, mode: Mode, strict: bool = False) -> int:
    rules, bad = Counter[str](), 0
    for seed in seeds:
        sys.stderr.write(f"\rseed {seed}  ")  # a world takes seconds
        try:
            made = run(make_world(seed, acts, mode))
            found = list(made.oracle.violations.values()) if strict else find_faults(made)
        except Exception as error:  # noqa: BLE001 - it must be seen, and the other worlds go on
            found = [Violation(f"error: {type(error).__name__}", -1, "", "", str(error)[:200], "none")]
        bad += bool(found)
        rules.update({one.rule for one in found})
        for one in found:
            write_lines(f"seed {seed} {mode}: {one}")
    write_lines(f"{mode}: {bad} of {len(seeds)} worlds have violations")
    for rule, number in rules.most_common():
        write_lines(f"{number:4} {rule}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
