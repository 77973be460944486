"""The documents agree with the code: every signal, detector, key, route and command, and code that runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from agents.collector import Collector
from agents.collectors.registry import COLLECTORS
from agents.gateway.receiver import REASONS
from detectors import DETECTORS
from detectors.base.detector import Detector
from detectors.base.state import State
from pipeline.api import act_routes, notifications, people_routes, routes
from pipeline.api.objectives.routes import objectives_router
from pipeline.commands.arguments import COMMANDS
from pipeline.config import sections
from pipeline.config.settings import KEY
from pipeline.foreign.mapping import list_shipped, load_mapping
from pipeline.ingest.foreign import FOREIGN_COUNTERS
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.records import SECOND, Frame
from pipeline.model.signals import signals_of_class
from pipeline.model.topology import Topology

ROOT = Path(__file__).parents[1]


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_module(ROOT / "docs" / "generate.py")


AGENTS_OWN_EVENTS = {"inventory", "collector", "gap", "counter_reset"}


def text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert text(f"docs/{name}") == generate.PAGES[name](), "run 'make docs'"


def keys(cls: Any, section: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yields (section, field) of every key that is not itself a section."""
    hints = get_type_hints(cls)
    for one in fields(cls):
        inner = [hints[one.name], *get_args(hints[one.name])]
        below = next((t for t in inner if is_dataclass(t) and isinstance(t, type)), None)
        name = f"{section}.{one.name}" if section else one.name
        if below is not None:
            yield from keys(below, name)
        if below is None or section:
            yield section, one


RECEIVER_LISTS = ("webhooks", "alertmanagers", "pagerduty", "slack", "teams", "apprise", "inhibit_rules")


@pytest.mark.parametrize(("section", "key"), [(s, f) for s, f in keys(sections.Config) if s])
def test_every_key_is_documented_with_its_default(section: str, key: Field[Any]) -> None:
    lists = {f"notify.{kind}": "###" for kind in RECEIVER_LISTS}
    lists |= {"admission.speaks_for": "###", "incidents.escalation": "###", "modes": "##"}
    lists |= {"acts.policies": "##", "topology.sources": "##", "impact.objectives": "##"}
    heading = f"{lists[section]} [[{section}]]" if section in lists else f"## [{section}]"
    name = key.metadata.get(KEY, key.name)
    page = text("docs/configuration.md")
    assert f"\n{heading}\n" in page, f"docs/configuration.md has no section {heading}"
    part = page.split(f"\n{heading}\n")[1].split("\n## ")[0]
    found = re.search(rf"^\| `{name}` \| (.*?) \|", part, re.M)
    assert found, f"docs/configuration.md: {heading}: no line for {name}"
    written = found[1].strip("`")
    if key.default is not MISSING and isinstance(key.default, (bool, int, float)):
        assert written == str(key.default).lower()
    elif isinstance(key.default, str) and key.default:
        assert written == f'"{key.default}"'


def test_every_open_section_is_documented() -> None:
    page = text("docs/configuration.md")
    assert "## [detector.NAME]" in page
    assert "## [collector.NAME]" in page


ROUTERS = (
    *(routes.process_router, routes.read_router, routes.incident_router, routes.mute_router),
    notifications.receiver_router,
    people_routes.people_router,
    act_routes.act_router,
    objectives_router,
)


@pytest.mark.parametrize(
    "route", [r for router in ROUTERS for r in router.routes if r.include_in_schema], ids=lambda r: str(r.path)
)
def test_every_route_is_documented(route: Any) -> None:
    page = text("docs/api.md")
    for method in route.methods - {"HEAD", "OPTIONS"}:
        assert f"`{method} {route.path}" in page


def test_every_command_is_documented() -> None:
    page = text("docs/commands.md")
    assert [name for name in COMMANDS if f"`fleetpulse {name}" not in page and f"`{name}`" not in page] == []


def test_every_option_is_documented_or_has_help() -> None:
    silent = [
        f"{name} {flags[0]}"
        for name, (_, options) in COMMANDS.items()
        for flags, settings in options
        if not settings.get("help")
    ]
    assert silent == []


ROWS = [(name, row) for name in generate.SECTIONS for row in generate.coverage(name)]


@pytest.mark.parametrize(("section", "row"), ROWS, ids=[f"{section}: {row['name']}" for section, row in ROWS])
def test_a_collector_declares_everything_that_the_coverage_calls_collected(section: str, row: dict[str, Any]) -> None:
    """Missing ones have a reason. Attributes come from inventories, which the collectors' tests check."""
    claimed = {signal for collector in COLLECTORS for signal in collector.signals} | {
        signal.name for c in ("agent", "collector") for signal in signals_of_class(c)
    }
    events = {kind for collector in COLLECTORS for kind in collector.events} | AGENTS_OWN_EVENTS
    assert set(row) <= {"name", "signals", "events", "attributes", "source", "reason"}
    assert set(row.get("signals", [])) <= claimed
    assert set(row.get("events", [])) <= events
    assert row.get("reason") or any(row.get(key) for key in ("signals", "events", "attributes"))


def test_the_source_of_a_collected_value_is_never_the_simulator_or_a_library_of_another_vendor() -> None:
    cells = {
        (section, str(row["name"])): generate.coverage_row(row).replace("\\|", "/").split(" | ")[3]
        for section, row in ROWS
    }
    assert [name for (_, name), source in cells.items() if "simulator" in source] == []
    others = {n: s for (section, n), s in cells.items() if section == "accelerators" and not n.startswith("NVIDIA")}
    assert len(others) >= 5
    assert [name for name, source in others.items() if "nvml" in source.lower() or not source] == []


def test_every_signal_and_event_of_a_collector_is_in_the_coverage() -> None:
    shown = {name for _, row in ROWS for key in ("signals", "events") for name in row.get(key, [])}
    claimed = {name for collector in COLLECTORS for name in (*collector.signals, *collector.events)}
    absent = sorted(claimed - shown)
    assert not absent, f"add to a row of docs/coverage/*.toml, then run 'make docs': {absent}"


def test_every_detector_documents_its_limits() -> None:
    page = text("docs/detectors.md")
    absent = [cls.name for cls in DETECTORS if f"## {cls.name}\n" not in page or cls.cannot_see not in page]
    assert not absent, f"run 'make docs': docs/detectors.md lacks {absent}"


def test_the_make_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.M))
    named = set(re.findall(r"make ([a-z-]+)", text("README.md")))
    assert {"run", "test"} <= named <= targets


def test_every_link_of_the_documents_resolves() -> None:
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)\)", page.read_text())]
    assert [f"{p.name}: {link}" for p, link in links if "://" not in link and not (p.parent / link).exists()] == []


def example(name: str) -> dict[str, Any]:
    """Returns the names defined by the README's example of that name, after running it."""
    found = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", text("README.md"), re.S)
    assert found is not None
    space: dict[str, Any] = {"__name__": f"readme_{name}"}
    exec(compile(found[1], f"README.md ({name})", "exec", dont_inherit=True), space)
    return space


def test_every_test_of_the_reliability_page_exists_and_no_bug_is_without_one() -> None:
    rows = re.findall(r"^\| (\d+) \|.*$", text("docs/reliability.md"), re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 23))
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text("docs/reliability.md"))
    assert len(named) > len(rows)
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in text(f"tests/{file}")] == []


def test_the_collector_of_the_readme_reads_this_host() -> None:
    collector: Collector = example("collector")["Uptime"]()
    collector.open("n1")
    (reading,) = collector.read()
    assert reading.entities == ("node:n1",)
    assert reading.columns["node.uptime"][0] > 0


def test_the_detector_of_the_readme_reports_the_third_hot_frame() -> None:
    detector: Detector = example("detector")["Hot"]()
    temperatures = ([95.0, 50.0], [95.0, 95.0], [95.0, np.nan], [50.0, 95.0])
    found = [detector.observe({"gpu": frame(i, values)}) for i, values in enumerate(temperatures)]
    assert [[(f.entity, f.onset) for f in findings] for findings in found] == [[], [], [("gpu:n1.0", 0)], []]


def frame(number: int, values: list[float]) -> Frame:
    entities = ("gpu:n1.0", "gpu:n1.1")
    return Frame(number * 10 * SECOND, "gpu", entities, {"gpu.temperature": np.array(values)}, Topology())


def test_the_upgrade_page_checks_the_configuration_with_each_form_of_the_new_version_before_a_restart() -> None:
    """What it refuses would end the services that the package restarts."""
    text = (ROOT / "docs" / "upgrade.md").read_text()
    assert 0 < text.index("config check` of the new version") < text.index("`dpkg -i fleetpulse-server_*.deb`")
    section = text.partition("## The configuration first")[2].partition("\n## ")[0]
    commands = "\n".join(line.strip() for line in section.splitlines() if line.startswith("    "))
    assert "dst: /opt/fleetpulse," in (ROOT / "deploy" / "packages" / "nfpm.yaml").read_text()
    assert 'ENTRYPOINT ["fleetpulse"]' in (ROOT / "deploy" / "images" / "Dockerfile").read_text()
    check = "config check --config /etc/fleetpulse/fleetpulse.toml"
    assert commands.count(f"/opt/fleetpulse.new/opt/fleetpulse/bin/fleetpulse {check}") == 2  # deb, rpm
    assert commands.count(f"/opt/fleetpulse.new/bin/fleetpulse {check}") == 1  # wheel
    assert re.search(rf"docker run --rm .*\n{check}", commands)
    assert "cpio" not in commands


def test_the_version_has_an_entry_in_the_changelog() -> None:
    found = re.search(r'^version = "(.*)"', text("pyproject.toml"), re.M)
    assert found is not None
    assert f"## [{found[1]}]" in text("CHANGELOG.md")


def test_every_installed_exact_version_is_pinned_once() -> None:
    whole = "\n".join(line for line in text("constraints.txt").splitlines() if not line.startswith("#"))
    pins = [pin.split() for pin in whole.replace("\\\n", " ").splitlines()]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", pin[0]) for pin in pins)
    assert len({pin[0].partition("==")[0].lower() for pin in pins}) == len(pins) > 80
    hashes = [[word for word in pin if word.startswith("--hash=")] for pin in pins]
    assert all(found and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in found) for found in hashes)


def test_requirements_of_every_extra_and_of_the_build_are_pinned_with_hashes() -> None:
    words = [sys.executable, str(ROOT / "deploy" / "requirements.py"), "all"]
    wanted = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    pinned = set(re.findall(r"^([A-Za-z0-9_.-]+)==", text("constraints.txt").lower().replace("_", "-"), re.MULTILINE))
    names = {re.split(r"[\[<>=]", one)[0].lower().replace("_", "-") for one in wanted}
    assert {"hatchling", "numpy", "duckdb", "streamlit", "kafka-python", "pip"} <= names <= pinned


def test_every_installation_command_checks_the_hashes() -> None:
    pages = "docs/install.md", "docs/agent.md", "docs/compose.md", "deploy/systemd/fleetpulse-agent.service"
    for page in ("Makefile", "deploy/images/Dockerfile", *pages):
        for command in re.findall(r"(?:pip|\(PIP\)) (?:install|download) ([^\n\\]*)", text(page)):
            known = ("--require-hashes", "$(HASHED)", "--no-deps --no-build-isolation", "--no-index")
            assert command.startswith(known) or " --require-hashes " in command, f"{page}: pip {command}"


def test_no_package_index_is_named() -> None:
    assert re.findall(r"https?://|--index|--find-links /", text("constraints.txt") + text("Makefile")) == [
        "http" + "://"  # the address of the dashboard, in the help of `make run`
    ]


def test_the_alerts_page_lists_the_detectors_that_learn_from_mark_as_normal() -> None:
    (paragraph,) = re.findall(
        r"\*\*Mark as normal\*\* sets a new baseline in .*?\n\n", text("docs/alerts.md"), re.DOTALL
    )
    learning = {one.name for one in DETECTORS if one.accept_as_normal is not Detector.accept_as_normal or learns(one())}
    assert set(re.findall(r"`(\w+)`", paragraph)) == learning


def learns(detector: Detector) -> bool:
    """Returns whether feedback resets cells of one of its parts."""
    return any(has_cells(piece) for _, piece in detector.parts_by_class(detector.device_class))


def has_cells(piece: State) -> bool:
    """Returns whether a reset changes cells of a piece or of its parts."""
    cells = any(isinstance(value, np.ndarray) for value in piece.snapshot().values())
    return cells or any(has_cells(inner) for _, inner in piece.resettable_parts())


def test_every_admission_rule_is_documented_with_its_help() -> None:
    from pipeline.ingest.admission import RULES

    page = text("docs/admission.md")
    assert [f"| `{rule.name}` | {rule.help} |" in page for rule in RULES.values()] == [True] * len(RULES)


def test_every_counter_of_other_senders_is_documented() -> None:
    page = text("docs/otlp.md")
    for name in (*FOREIGN_COUNTERS, "foreign_rejected"):
        assert f"fleetpulse_ingest_{name}_total" in page
    families = {"accepted", "refused", "stored", "repeated", "requests"}
    assert all(f"fleetpulse_gateway_{name}_total" in page for name in families)
    assert all(f"`{reason}`" in page for reason in REASONS.values())


def test_the_examples_of_exporters_names_are_in_the_mappings() -> None:
    page = text("docs/otlp.md").partition("### What their names become")[2].partition("## Straight")[0]
    rows = [re.findall(r"`([^`]+)`", line) for line in page.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == 7
    for metric, signal, *_ in rows:
        found = {m.signal for name in list_shipped() for m in load_mapping(name).find_metrics(metric)}
        assert signal in found or signal.startswith("custom:")


def test_what_leaves_a_node_names_whatever_identifies_people_and_processes() -> None:
    """For who judges privacy: keys of events' data that say who or what ran, each with the word that names it."""
    section = (ROOT / "docs/security.md").read_text().partition("## What leaves a node")[2].partition("\n## ")[0]
    words = {"user": "user", "namespace": "namespace", "pid": "ids of processes", "pids": "ids of processes"}
    words |= {"comm": "id and name of one that hangs", "process": "an XID names", "text": "with their text"}
    sent = {key for kind in EVENT_KINDS.values() if not kind.internal for key in kind.data}
    assert words.keys() <= sent
    assert [key for key, word in words.items() if word not in section] == []
