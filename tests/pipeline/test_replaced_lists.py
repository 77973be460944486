"""A list of a later file that replaces an earlier one is said: receivers out of force were silent pages."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline.commands import doctor
from pipeline.commands.arguments import build_parser
from pipeline.commands.configuration import run_config
from pipeline.commands.setup import run_setup
from pipeline.config.sections import load_config
from pipeline.runtime.reload import Reload

SLACK = '[[notify.slack]]\nname = "{}"\nurl_file = "/nowhere"\n'
ON_CALL, OPS = SLACK.format("on-call"), SLACK.format("ops")
WHY = (
    " has [[notify.slack]] too, and a list of a later file replaces that of an earlier one; expected all entries in "
    "one of the two files"
)


@pytest.fixture
def main(tmp_path: Path) -> Path:
    (tmp_path / "conf.d").mkdir()
    path = tmp_path / "fleetpulse.toml"
    path.write_text(ON_CALL)
    return path


@pytest.fixture
def later(main: Path) -> Path:
    path = main.parent / "conf.d/50-site.toml"
    path.write_text(OPS)
    return path


def found(main: Path) -> tuple[str, ...]:
    return load_config(main, {"FLEETPULSE__AGENT__NODE": "n1"}).replaced


def test_config_check_names_both_files_and_what_is_not_in_force(main: Path, later: Path) -> None:
    rows, _ = run_config(build_parser().parse_args(["config", "check", "--config", str(main)]))
    (warned,) = (row for row in rows if row["state"] == "warning")
    assert warned["file"] == str(main)
    assert warned["found"] == f"[[notify.slack]] on-call is not in force, as {later}{WHY}"


def test_setup_names_the_file_that_takes_its_receiver_out_of_force(main: Path, later: Path) -> None:
    words = ["setup", "--replace", "--role", "one-host", "--site", "x", "--gpus", "0", "--config", str(main)]
    given = build_parser().parse_args([*words, "--webhook", "https://hooks.slack.com/services/T/B/k"])
    said = run_setup(given, lambda _: "", False, main.parent)
    (warned,) = (line for line in said if line.startswith("warning"))
    assert warned.startswith(f"warning: {main}: [[notify.slack]] on-call is not in force, as {later} has")
    later.write_text("[[notify.slack")
    assert [line for line in run_setup(given, lambda _: "", False, main.parent) if f"warning: {later}: is not" in line]


def test_start_and_reload_log_it(main: Path, later: Path) -> None:
    logged: list[str] = []
    before = signal.getsignal(signal.SIGHUP)
    try:
        hangup = Reload("pipeline", load_config(main), lambda: load_config(main), (), lambda *_: None, logged.append)
        started, logged[:] = list(logged), []
        main.write_text(f"{ON_CALL}{SLACK.format('second')}")  # which changes nothing that is in force
        signal.raise_signal(signal.SIGHUP)
        assert not hangup.poll()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [line.partition(" not in force")[0] for line in started] == [f"warning: {main}: [[notify.slack]] on-call is"]
    nothing, again = logged
    assert nothing == "configuration reloaded: nothing changed"
    assert again.startswith(f"warning: {main}: [[notify.slack]] on-call, second are not in force, as {later} has")


def test_doctor_says_it_beside_the_receivers(main: Path, later: Path) -> None:
    checks = doctor.receivers(load_config(main))
    assert isinstance(checks, list)
    (check,) = (one for one in checks if one.state == "warn" and "not in force" in one.found)
    assert check.found.startswith(f"{main}: [[notify.slack]] on-call is not in force, as {later} has")


ENTRIES = {
    "modes": '[[modes]]\nmode = "record"\ndetector = "{}"\n',
    "acts.policies": '[[acts.policies]]\nname = "{}"\n',
    "notify.webhooks": '[[notify.webhooks]]\nname = "{}"\nurl = "https://h.example/"\n',
    "admission.speaks_for": '[[admission.speaks_for]]\nnode = "{}"\nentities = ["gpu:*"]\n',
    "collector.redfish.bmcs": '[[collector.redfish.bmcs]]\nname = "{}"\nurl = "https://h.example"\n',
}


@pytest.mark.parametrize("key", ENTRIES)
def test_every_list_of_tables_counts(key: str, main: Path, later: Path) -> None:
    main.write_text(ENTRIES[key].format("a1") + ENTRIES[key].format("b2"))
    later.write_text(ENTRIES[key].format("b2"))
    (line,) = found(main)
    lost = "entry 1" if key == "modes" else "a1"
    assert line.startswith(f"{main}: [[{key}]] {lost} is not in force, as {later} has [[{key}]] too")


def test_a_third_file_replaces_the_second(main: Path, later: Path) -> None:
    last = later.with_name("60.toml")
    last.write_text(SLACK.format("third"))
    assert [line.partition(" is not in force, as ")[::2] for line in found(main)] == [
        (f"{main}: [[notify.slack]] on-call", f"{later}{WHY}"),
        (f"{later}: [[notify.slack]] ops", f"{last}{WHY}"),
    ]


MEANT = [
    OPS + ON_CALL,
    '[[notify.slack]]\nname = "on-call"\nurl_file = "/elsewhere"\n',
    "[notify]\nslack = []\n",
    '[[notify.teams]]\nname = "t"\nurl_file = "/nowhere"\n',
    f'[[groups]]\nnodes = "n1"\n{OPS.replace("notify.", "groups.notify.")}',
    '[notify.route]\nreceiver = "on-call"\n',
]
"""Later files with which nothing is lost, or what they take away is meant."""


@pytest.mark.parametrize("text", MEANT)
def test_nothing_is_said_where_nothing_is_lost_or_it_is_meant(text: str, main: Path, later: Path) -> None:
    later.write_text(text)
    assert found(main) == ()
