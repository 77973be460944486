"""Drop-ins and groups of the configuration, the commands that show them, and the reload of a running pipeline."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fleetpulse
from pipeline.commands import doctor
from pipeline.commands.arguments import build_parser
from pipeline.commands.configuration import run_config
from pipeline.config import files
from pipeline.config.changes import list_changes
from pipeline.config.sections import load_config
from pipeline.model.errors import ConfigError, UsageError
from pipeline.runtime.systemd import CREDENTIALS
from tests.until import until

ROOT = Path(__file__).parents[2]
MAIN = """
[site]
name = "east"
[agent]
interval = 2
[collector.pci]
gpus_expected = 4
[[groups]]
nodes = ["h200-*", "b200-?"]
[groups.collector.pci]
gpus_expected = 8
[groups.agent]
interval = 5
"""


@pytest.fixture
def main(tmp_path: Path) -> Path:
    (tmp_path / "conf.d").mkdir()
    path = tmp_path / "fleetpulse.toml"
    path.write_text(MAIN)
    return path


def as_node(name: str) -> Mapping[str, str]:
    return {"FLEETPULSE__AGENT__NODE": name}


def drop_in(main: Path, name: str, text: str) -> Path:
    path = main.parent / "conf.d" / name
    path.write_text(text)
    return path


def test_drop_ins_win_in_the_order_of_their_names_key_by_key(main: Path) -> None:
    drop_in(main, "20-b.toml", "[api]\nport = 2\n")
    drop_in(main, "10-a.toml", "[api]\nport = 1\nsql_rows = 7\n")
    drop_in(main, "30-off.toml.disabled", "[api]\nport = 3\n")
    config = load_config(main, as_node("n1"))
    assert (config.api.port, config.api.sql_rows, config.site.name) == (2, 7, "east")


def test_a_group_changes_only_the_nodes_that_match_and_the_environment_wins_over_it(main: Path) -> None:
    assert load_config(main, as_node("a100-1")).collector["pci"]["gpus_expected"] == 4
    config = load_config(main, as_node("h200-17"))
    assert (config.collector["pci"]["gpus_expected"], config.agent.interval) == (8, 5)
    config = load_config(main, {**as_node("b200-1"), "FLEETPULSE__AGENT__INTERVAL": "9"})
    assert config.agent.interval == 9


def test_a_group_of_a_later_drop_in_and_a_node_named_in_a_file_count(main: Path) -> None:
    drop_in(main, "50.toml", '[agent]\nnode = "h200-1"\n[[groups]]\nnodes = "h200-1"\n[groups.agent]\ninterval = 7\n')
    config = load_config(main, {})
    assert (config.agent.node, config.agent.interval) == ("h200-1", 7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[api]\nprot = 1\n", "50.toml: [api] prot: no such key; did you mean 'port'?"),
        ("[api\n", "50.toml: is not TOML"),
        (f"[api]\nport = {'9' * 5000}\n", "50.toml: is not TOML"),
        (f"[api]\nport = {'[' * 5000}\n", "50.toml: is not TOML"),
        ("groups = 3\n", "50.toml: groups = 3: expected tables, each written [[groups]]"),
        (
            "[[groups]]\n[groups.api]\nport = 1\n",
            "50.toml: [[groups]] 1: nodes = None: expected patterns of node names",
        ),
        ('[[groups]]\nnodes = ["a", "h[200"]\n', "50.toml: [[groups]] 1: nodes = 'h[200': a bracket is not closed"),
        ('[[groups]]\nnodes = "h[]"\n', "50.toml: [[groups]] 1: nodes = 'h[]': a bracket is not closed"),
        ('[[groups]]\nnodes = "*"\nport = 1\n', "50.toml: [[groups]] 1: 'port' is no section"),
        ('[[groups]]\nnodes = "*"\n[groups.agent]\nnode = "x"\n', "[agent] node cannot be set by a group"),
        (
            '[[groups]]\nnodes = "*"\n[groups.api]\nport = "x"\n',
            "50.toml: [[groups]] 1: [api] port = 'x': expected int",
        ),
        ('source = "x"\n', "50.toml: [source] is not a section"),
    ],
)
def test_errors_name_the_drop_in_or_the_group(main: Path, text: str, said: str) -> None:
    drop_in(main, "50.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(main, as_node("n1"))
    assert said in str(caught.value)


@pytest.mark.parametrize("pattern", ["n[0-9]", "n[!a]", "n[]1]", "n[[1]", "[mn][1-3]"])
def test_a_pattern_with_a_choice_of_characters_is_one(main: Path, pattern: str) -> None:
    drop_in(main, "50.toml", f'[[groups]]\nnodes = "{pattern}"\n[groups.agent]\ninterval = 7\n')
    assert load_config(main, as_node("n1")).agent.interval == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o711])
def test_drop_ins_that_the_user_may_not_read_are_an_error(mode: int) -> None:
    """Root's `config check` uses them; the service went on without them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        main, folder = Path(name, "fleetpulse.toml"), Path(name, "conf.d")
        main.write_text(MAIN)
        folder.mkdir()
        drop_in(main, "50.toml", "[api]\nport = 9999\n")
        folder.chmod(mode)
        assert load_config(main, as_node("n1")).api.port == 9999
        os.seteuid(65534)
        try:
            with pytest.raises(ConfigError) as caught:
                load_config(main, as_node("n1"))
        finally:
            os.seteuid(0)
    assert str(caught.value) == f"{folder}: cannot be read: Permission denied; expected a folder of TOML files"


def test_without_a_name_the_folder_counts_before_the_host(
    main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "HOST", main)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert load_config(None, {}).source == str(main)
    Path("fleetpulse.toml").write_text("")
    assert load_config(None, {}).source == "fleetpulse.toml"


def rows(*words: str) -> list[dict[str, Any]]:
    found, _ = run_config(build_parser().parse_args(["config", *words]))
    return [dict(row) for row in found]


def test_check_reads_the_groups_of_other_nodes_too(main: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETPULSE__AGENT__NODE", "n1")
    assert [row["state"] for row in rows("check", "--config", str(main))] == ["ok", "ok"]
    drop_in(main, "50.toml", '[[groups]]\nnodes = "elsewhere"\n[groups.api]\nport = -1\n')
    with pytest.raises(ConfigError, match=r"50.toml: \[\[groups\]\] 1: \[api\] port = -1"):
        rows("check", "--config", str(main))


ROUTED = '[[notify.webhooks]]\nname = "oncall"\nurl = "https://h.example/"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[[incidents.escalation]]\nafter_minutes = 5\nreceivers = ["oncall"]\n'
            '[[incidents.escalation]]\nafter_minutes = 9\nreceivers = ["oncal"]\n',
            r"\[\[incidents.escalation\]\] 2: receivers = .*: 'oncal' is not a receiver; did you mean 'oncall'",
        ),
        ('[notify.route]\nreceiver = "nosuch"\n', r"\[notify.route\] receiver = 'nosuch': .*; known: oncall"),
        (
            '[[groups]]\nnodes = "x"\n[[groups.incidents.escalation]]\nafter_minutes = 5\nreceivers = ["no"]\n',
            r"\[\[groups\]\] 1: .*'no' is not a receiver; known: oncall",
        ),
    ],
)
def test_check_refuses_receivers_that_do_not_exist(main: Path, text: str, said: str) -> None:
    """A page would escalate to no one, and a pipeline would not start. The message names the file and what exists."""
    main.write_text(ROUTED + text)
    with pytest.raises(ConfigError, match=f"{main}: {said}"):
        rows("check", "--config", str(main))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[notify.webhooks]]\nname = "ops"\nurl = "http://alerts.internal/hook"\n', "ops: url: found http; expected"),
        ('[[notify.webhooks]]\nname = "ops"\nurl = "ftp://h.example/hook"\n', "ops: url = .*: expected https"),
        ('[[notify.webhooks]]\nname = "ops"\nurl = "https://10.0.0.1/"\n', "ops: url = .* is private"),
        (
            '[[notify.webhooks]]\nname = "ops"\nurl = "https://h.example/"\nhealth_url = "http://h.example/"\n',
            "ops: health_url: found http",
        ),
        (
            '[[notify.webhooks]]\nname = "ops"\nurl_file = "/nosuch"\nusername = "ada"\n',
            "ops: expected username and password_file, or neither",
        ),
        ('[[notify.alertmanagers]]\nname = "am"\nurls = ["http://am.example:9093"]\n', "am: urls: found http"),
        ('[[notify.pagerduty]]\nname = "pd"\nrouting_key_file = "/nosuch"\nurl = "ftp://x"\n', "pd: url"),
        ('[[notify.slack]]\nname = "s"\n', "s: expected token_file and channel, or url_file"),
        ('[[notify.teams]]\nname = "t"\nurl_file = "/nosuch"\nallow_private = ["ten"]\n', "t: allow_private"),
        (
            '[[groups]]\nnodes = "x"\n[[groups.notify.webhooks]]\nname = "ops"\nurl = "ftp://h.example/"\n',
            r"\[\[groups\]\] 1: .*ops: url = .*: expected https",
        ),
    ],
)
def test_check_refuses_receivers_that_can_never_be_called(main: Path, text: str, said: str) -> None:
    """A reload was accepted, and the start after it ended with exit code 2, after which the unit stays down."""
    main.write_text(text)
    with pytest.raises(ConfigError, match=said):
        rows("check", "--config", str(main))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[detector.xid]\nnosuch = 1\n", "[detector.xid] nosuch: no such key"),
        ("[detector.nosuch]\n", "[detector.nosuch]: no such detector"),
        ("[collector.pci]\nnosuch = 1\n", "[collector.pci] nosuch: no such key"),
        ('[[modes]]\ndetector = "nosuch"\nmode = "record"\n', "[[modes]] detector = 'nosuch': no such detector"),
        ('[[notify.webhooks]]\nname = "w"\nurl = "http://h.example"\n', "[[notify.webhooks]] w: url: found http"),
        ('[[groups]]\nnodes = "*"\n[groups.detector.xid]\nnosuch = 1\n', "[detector.xid] nosuch: no such key"),
    ],
)
def test_errors_of_detectors_collectors_and_receivers_name_the_drop_in(
    main: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """They are checked after all files are merged. The third file is sound."""
    path = drop_in(main, "50.toml", text)
    drop_in(main, "60.toml", "[api]\nport = 1\n")
    where = f"{path}: [[groups]] 1" if "groups" in text else str(path)
    assert fleetpulse.main(["config", "check", "--config", str(main)]) == 2
    assert f"fleetpulse: {where}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("file", [True, False])
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("FLEETPULSE__DETECTOR__STRAGGLER__FOO", "1", "[detector.straggler] foo: no such key"),
        ("FLEETPULSE__COLLECTOR__PCI__FOO", "1", "[collector.pci] foo: no such key"),
        (
            "FLEETPULSE__NOTIFY__WEBHOOKS",
            "[{name='w', url='http://h.example'}]",
            "[[notify.webhooks]] w: url: found http",
        ),
    ],
)
def test_errors_of_detectors_collectors_and_receivers_name_the_variable(
    main: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    said: str,
    file: bool,
) -> None:
    monkeypatch.chdir(main.parent / "conf.d")
    monkeypatch.setattr(files, "HOST", Path("none.toml"))
    monkeypatch.setenv("FLEETPULSE__API__PORT", "1")
    monkeypatch.setenv(name, text)
    assert fleetpulse.main(["config", "check", *(["--config", str(main)] if file else [])]) == 2
    assert f"fleetpulse: environment: {name}: {said}" in capsys.readouterr().err


def test_check_reads_no_secret_of_a_receiver(main: Path) -> None:
    """The person who checks may have no right to, and the copy of a unit exists only while it runs."""
    main.write_text(
        '[[notify.webhooks]]\nname = "a"\nurl_file = "/nosuch"\nsigning_secret_file = "/nosuch"\n'
        '[[notify.pagerduty]]\nname = "b"\nrouting_key_file = "/nosuch"\n'
        '[[notify.slack]]\nname = "c"\nchannel = "#x"\ntoken_file = "/nosuch"\n'
        '[[notify.teams]]\nname = "d"\nurl_file = "/nosuch"\n'
        '[[notify.alertmanagers]]\nname = "e"\nurls = ["https://h.example"]\ntoken_file = "/nosuch"\n'
    )
    found = rows("check", "--config", str(main))
    assert [row["state"] for row in found] == ["ok"] + ["missing"] * 6
    keys = ("a: url_file", "a: signing_secret_file", "b: routing_key_file", "c: token_file", "d: url_file")
    for key, row in zip(keys, [row for row in found[1:] if "alertmanagers" not in row["found"]], strict=True):
        assert row["file"] == "/nosuch"
        assert f"{key}: no such file; expected before the pipeline starts" in row["found"]


def test_check_says_nothing_of_a_secret_that_is_there_or_a_copy_of_a_unit(main: Path, tmp_path: Path) -> None:
    (tmp_path / "url").write_text("")
    copy = CREDENTIALS / "fleetpulse-pipeline.service" / "key"
    main.write_text(
        f'[[notify.webhooks]]\nname = "a"\nurl_file = "{tmp_path / "url"}"\n'
        f'[[notify.pagerduty]]\nname = "b"\nrouting_key_file = "{copy}"\n'
    )
    assert [row["state"] for row in rows("check", "--config", str(main))] == ["ok"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[detector.xid\n", "{advice}: is not TOML"),
        ("[detector.xid]\nrun = 1\n", "{advice}: [detector.xid]: expected the texts advice and runbook"),
        ("[detectors.xid]\n", "{advice}: [detectors]: expected [detector.NAME] or [cause.KIND]"),
        (None, "[incidents] advice_file = '{advice}': cannot be read: No such file"),
    ],
)
def test_check_refuses_advice_that_a_start_refuses(
    main: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    advice = tmp_path / "advice.toml"
    if text is not None:
        advice.write_text(text)
    path = drop_in(main, "50.toml", f'[incidents]\nadvice_file = "{advice}"\n')
    assert fleetpulse.main(["config", "check", "--config", str(main)]) == 2
    assert f"fleetpulse: {path}: {said.format(advice=advice)}" in capsys.readouterr().err
    advice.write_text('[detector.xid]\nadvice = "call ann"\n')
    assert fleetpulse.main(["config", "check", "--config", str(main)]) == 0


@pytest.mark.parametrize(
    "text",
    [
        '[[notify.webhooks]]\nname = "w"\nurl = "ftp://u:PASS@h.example/WORD"\n',
        '[[notify.webhooks]]\nname = "w"\nurl = "https://u:PASS@h.example/WORD"\n',
        '[[notify.alertmanagers]]\nname = "w"\nurls = ["https://u:PASS@h.example/api/v2/WORD"]\n',
        '[[notify.webhooks]]\nname = "w"\nurl = "u:PASS@h.example/WORD"\n',
        '[[notify.webhooks]]\nname = "w"\nurl = "h.example/WORD"\n',
        '[[notify.webhooks]]\nname = "w"\nurl = "https://u:12 PASS@h.example/WORD"\n',
        '[[collector.redfish.bmcs]]\nname = "b"\nurl = "https://u:12 PASS@h.example/WORD"\n',
        '[notify]\nwebhooks = "https://u:12 PASS@h.example/WORD"\n',
        '[check]\napi_url = "u:12 PASS@h.example/WORD"\n',
        '[opentelemetry]\nendpoint = "ftp://u:PASS@h.example/WORD"\n',
        '[kafka]\ntoken_endpoint = "https://u:PASS@h.example/WORD"\n',
    ],
)
def test_errors_show_the_hosts_of_addresses_alone(main: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """The log of a start and what `doctor` says are pasted into tickets."""
    main.write_text(text)
    assert fleetpulse.main(["config", "check", "--config", str(main)]) == 2
    said = capsys.readouterr().err
    with contextlib.suppress(ConfigError):
        checks = doctor.run_checks(load_config(main), [doctor.receivers])
        said += doctor.format_checks(checks)
        assert "fix: correct [[notify." in said or "notify" not in text
    assert [word for word in ("PASS", "WORD") if word in said] == []


def test_show_names_the_file_group_or_variable_that_set_a_key(main: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETPULSE__API__PORT", "8700")
    path = drop_in(main, "50.toml", "[store]\nhot_hours = 12\n")
    found = {row["key"]: row for row in rows("show", "--config", str(main), "--node", "h200-1", "--changed")}
    assert found["site.name"] == {"key": "site.name", "value": "east", "from": str(main)}
    assert found["store.hot_hours"]["from"] == str(path)
    assert found["agent.interval"] == {"key": "agent.interval", "value": 5.0, "from": f"{main}: [[groups]] 1"}
    assert (found["api.port"]["value"], found["api.port"]["from"]) == (8700, "FLEETPULSE__API__PORT")
    assert "api.host" not in found
    path.write_text("[notify.route]\ncontinue = true\n")
    found = {row["key"]: row for row in rows("show", "--config", str(main), "--changed")}
    assert found["notify.route.continue"] == {"key": "notify.route.continue", "value": True, "from": str(path)}


def test_show_and_diff_show_the_hosts_of_addresses_alone(main: Path, tmp_path: Path) -> None:
    """Slack's, Teams' and PagerDuty's addresses have the key in the path. Tables in lists have addresses too."""
    other = tmp_path / "other.toml"
    hook = '[[notify.webhooks]]\nname = "w"\nurl = "https://hooks.slack.com/services/T0/B0/key"\n'
    bmc = '[[collector.redfish.bmcs]]\nname = "b"\nurl = "https://ada:key@bmc.example/redfish"\n'
    other.write_text(hook + bmc)
    shown = {row["key"]: row["value"] for row in rows("show", "--config", str(other))}
    assert shown["notify.webhooks[0].url"] == "https://hooks.slack.com/(hidden)"
    assert shown["collector.redfish.bmcs"] == [{"name": "b", "url": "https://bmc.example/(hidden)"}]
    differing = {row["key"]: row["there"] for row in rows("diff", str(other), "--config", str(main))}
    assert differing["notify.webhooks[0].url"] == shown["notify.webhooks[0].url"]
    said = str([*shown.values(), *differing.values()])
    assert [part for part in ("T0/B0", "ada") if part in said] == []


def test_show_without_a_flag_lists_every_key_and_with_changed_only_those_that_are_set(main: Path) -> None:
    every, changed = rows("show", "--config", str(main)), rows("show", "--changed", "--config", str(main))
    assert len(every) > 100
    assert 0 < len(changed) < 20


def test_diff_lists_the_keys_whose_values_differ(main: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(MAIN.replace("east", "west"))
    (row,) = rows("diff", str(other), "--config", str(main))
    assert row == {"key": "site.name", "here": "east", "there": "west"}


def test_a_table_or_list_that_one_side_lacks_is_shown_by_its_keys_alone(tmp_path: Path) -> None:
    """There was a row `collector {}` beside the key that differs."""
    here, there = tmp_path / "here.toml", tmp_path / "there.toml"
    here.write_text("")
    receiver = '[[notify.slack]]\nname = "a"\nurl_file = "/etc/a"\n'
    there.write_text(f"[collector.pci]\ngpus_expected = 8\n{receiver}")
    found = rows("diff", str(there), "--config", str(here))
    assert {"key": "collector.pci.gpus_expected", "here": None, "there": 8} in found
    assert {"collector", "notify.slack"}.isdisjoint(row["key"] for row in found)
    assert not [row for row in found if row["here"] in ({}, [], None, "") and row["there"] in ({}, [], None, "")]
    there.write_text('[notify.route]\nreceiver = ""\n')
    assert {"key": "notify.route", "here": None, "there": None} not in rows("diff", str(there), "--config", str(here))
    there.write_text('[agent]\ncollectors = ["cpu"]\n')
    (row,) = rows("diff", str(there), "--config", str(here))
    assert row == {"key": "agent.collectors", "here": [], "there": ["cpu"]}


@pytest.mark.parametrize(
    ("kept", "more", "key", "value"),
    [
        ("", "[collector.training]\ntrusted = []\n", "collector.training.trusted", []),
        ("", '[collector.filesystems]\nroot = ""\n', "collector.filesystems.root", ""),
        ("", "[detector.silence]\n", "detector.silence", {}),
        ("[collector.training]\nparts = ['/x']\n", "trusted = []\n", "collector.training.trusted", []),
    ],
)
def test_an_empty_value_of_a_raw_table_differs_from_a_key_that_is_missing(
    main: Path, kept: str, more: str, key: str, value: object
) -> None:
    """A missing key has its owner's default, which need not be empty. A reload said that nothing changed."""
    main.write_text(MAIN + kept)
    other = main.with_name("other.toml")
    other.write_text(MAIN + kept + more)
    assert rows("diff", str(other), "--config", str(main)) == [{"key": key, "here": None, "there": value}]
    with contextlib.redirect_stdout(io.StringIO()) as table:
        assert fleetpulse.main(["config", "diff", str(other), "--config", str(main)]) == 1
    assert table.getvalue().splitlines()[-1].split() == [key, repr(value)]
    before, after = load_config(main), load_config(other)
    assert list_changes(before, after, [], "agent") == [f"{key}: none -> {value or repr(value)}"]
    assert list_changes(after, before, [], "agent") == [f"{key}: {value or repr(value)} -> none"]


def test_a_group_that_differs_is_seen_as_its_nodes_read_it(main: Path, tmp_path: Path) -> None:
    """As this host reads two files whose groups of other nodes differ, they are the same."""
    other = tmp_path / "other.toml"
    group = '[[groups]]\nnodes = ["b300-*"]\n[groups.collector.pci]\ngpus_expected = 8\n'
    other.write_text(MAIN + group)
    words = ("diff", str(other), "--config", str(main))
    assert rows(*words) == [] == rows(*words, "--node", "a100-1")
    (row,) = rows(*words, "--node", "b300-1")
    assert (row["key"], row["there"]) == ("collector.pci.gpus_expected", 8)


def test_a_reload_cannot_move_the_store(main: Path, tmp_path: Path) -> None:
    before = load_config(main)
    drop_in(main, "50.toml", f'[store]\npath = "{tmp_path}/other.duckdb"\n')
    with pytest.raises(UsageError, match=r"store.path changed: restart"):
        list_changes(before, load_config(main), ["store.path"], "pipeline")


def test_a_reload_names_the_changed_keys_with_both_values_and_no_secret(main: Path) -> None:
    before = load_config(main)
    drop_in(main, "50.toml", '[budget]\ndays = 3\n[[notify.webhooks]]\nname = "w"\nurl = "https://h.example/s3cret"\n')
    changes = list_changes(before, load_config(main), ["store.path"], "pipeline")
    assert f"budget.days: {before.budget.days} -> 3.0" in changes
    assert "notify.webhooks[0].url: none -> https://h.example/(hidden)" in changes
    assert "s3cret" not in str(changes)
    drop_in(main, "60.toml", f'[notify]\nexternal_url = "https://{"a" * 80}.example"\n')
    (long,) = [one for one in list_changes(before, load_config(main), [], "") if "external_url" in one]
    assert len(long) < 100


@pytest.mark.slow
def test_a_pipeline_reloads_on_sighup_keeps_its_process_and_refuses_a_wrong_file(tmp_path: Path) -> None:
    """Over the real command: the audit has one row for the refusal and one for the reload."""
    main = tmp_path / "fleetpulse.toml"
    base = f'[store]\npath = "{tmp_path}/s.duckdb"\n[spool]\ndirectory = "{tmp_path}/spool"\n[api]\nport = 0\n'
    unknown = '[[incidents.escalation]]\nafter_minutes = 5\nreceivers = ["nosuch"]\n'
    main.write_text(base + unknown)
    words = [sys.executable, str(ROOT / "fleetpulse.py"), "pipeline", "--config", str(main)]
    log = tmp_path / "log"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    refused = subprocess.run(words, capture_output=True, text=True, env=environ)
    assert refused.returncode == 2
    assert f"{main}: [[incidents.escalation]] 1: receivers = ['nosuch']: 'nosuch' is not a" in refused.stderr
    main.write_text(base)
    occupied = socket.create_server(("127.0.0.1", 0))
    with occupied, log.open("w") as said, subprocess.Popen(words, stderr=said, env=environ) as pipeline:
        try:
            until(lambda: "fleetpulse pipeline: store" in log.read_text(), 90)
            main.write_text(base + "[budget]\ndayz = 3\n")
            until(lambda: _hang_up(pipeline) and "not reloaded, nothing changed" in log.read_text(), 300)
            main.write_text(base + unknown)
            until(lambda: _hang_up(pipeline) and "'nosuch' is not a receiver" in log.read_text(), 300)
            taken = base.replace("port = 0", f"port = {occupied.getsockname()[1]}")
            main.write_text(taken)
            until(lambda: _hang_up(pipeline) and "not reloaded, nothing changed: [api] host" in log.read_text(), 300)
            main.write_text(base + "[budget]\ndays = 3\n")
            url = re.findall(r"API (http://[0-9.:]+)", log.read_text())[0]
            pipeline.send_signal(signal.SIGHUP)
            until(lambda: "starts again" in _read_reasons(url), 300)
            status = Path(f"/proc/{pipeline.pid}/status")
            until(lambda: "SigBlk:\t0000000000000001" in status.read_text(), 300)
            pipeline.send_signal(signal.SIGHUP)  # before the new start answers it: it waits
            until(lambda: "starts again" not in _read_reasons(url), 300)
            until(lambda: log.read_text().count("fleetpulse pipeline: store") == 2, 300)
            until(lambda: "nothing changed" in log.read_text().rpartition("fleetpulse pipeline: store")[2], 300)
            assert re.findall(r"API (http://[0-9.:]+)", log.read_text()) == [url, url]
            assert pipeline.poll() is None
            main.write_text(base + "[budget]\ndays = 4\n")
            pipeline.send_signal(signal.SIGHUP)
            until(lambda: "4.0; starting again" in log.read_text(), 300)
        finally:
            pipeline.terminate()  # also in the middle of a reload
            assert pipeline.wait(30) in (0, -signal.SIGTERM)
    query = "SELECT actor, reason, outcome FROM audit WHERE action = 'reload configuration' ORDER BY time"
    ran = subprocess.run(
        [*words[:2], "sql", query, "--output", "json", "--config", str(main)],
        capture_output=True,
        text=True,
        env=environ,
    )
    found = [tuple(row.values()) for row in json.loads(ran.stdout)]
    assert found[-2:] == [("SIGHUP", f"budget.days: {change}", "done") for change in ("28.0 -> 3.0", "3.0 -> 4.0")]
    assert "did you mean 'days'?" in found[0][1]
    assert found[0][2] == "refused"


def _read_reasons(url: str) -> str:
    """Why the pipeline is not ready. Raises URLError if its address refuses connections."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=30) as answer:
            assert json.load(answer)["ready"]
            return ""
    except urllib.error.HTTPError as error:
        return "; ".join(json.loads(error.read())["reasons"])


def _hang_up(pipeline: subprocess.Popen[bytes]) -> bool:
    pipeline.send_signal(signal.SIGHUP)
    return True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_this_user_may_not_enter_has_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo -u fleetpulse fleetpulse ...` in /root ended with `fleetpulse.toml: cannot be read`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "HOST", Path("/proc/self/status"))
    (tmp_path / "fleetpulse.toml").touch(0o644)
    tmp_path.chmod(0o700)
    assert files.find_file(None, {}) == Path("fleetpulse.toml")
    os.seteuid(65534)
    try:
        found = files.find_file(None, {})
        monkeypatch.setattr(files, "HOST", tmp_path / "fleetpulse.toml")
        denied = files.find_file(None, {})
    finally:
        os.seteuid(0)
    assert found == Path("/proc/self/status")
    assert denied == tmp_path / "fleetpulse.toml", "that of the host exists, and its reading names the fault"
