"""The table of XIDs as data: complete, versioned, and changed by a file of the user key by key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from agents.collectors.gpu import xid_table
from agents.collectors.gpu.xid import XidEvents
from agents.collectors.gpu.xid_table import SEVERITIES, SHIPPED, load_xid_table
from agents.collectors.host import kernel_patterns
from agents.collectors.host.kernel_log import KernelLog
from agents.collectors.registry import configured_collectors
from pipeline.model.errors import ConfigError

KEYS = {"codes", "name", "class", "severity", "action", "then", "products", "follows", "peers"}
CLASSES = "application driver firmware gpu memory nvlink pcie power c2c security configuration consequence"
MUST = (
    *(13, 31, 32, 38, 39, 40, 41, 43, 45, 46, 48, 54, 62, 63, 64, 68, 69, 70, 71, 72, 74, 75, 76, 77, 78, 79, 80, 85),
    *(92, 93, 94, 95, 109, 110, 119, 120, 121, *range(126, 138), 140, 141, 143, *range(144, 152), *range(154, 166)),
    *(167, 168, 169, 171, 172),
)


def test_the_shipped_table_has_every_key_of_every_entry_and_a_version() -> None:
    raw = tomllib.loads(SHIPPED.read_text())
    assert re.fullmatch(r"\d{4}-\d{1,2}-\d+", raw["version"])
    assert "docs.nvidia.com" in raw["source"]
    assert [entry["codes"] for entry in raw["xid"] if set(entry) != KEYS] == []
    codes = [code for entry in raw["xid"] for code in entry["codes"]]
    assert len(codes) == len(set(codes))
    switch = [code for entry in raw["sxid"] for code in entry["codes"]]
    assert len(switch) == len(set(switch))


def test_the_shipped_table_has_the_codes_of_the_catalogue() -> None:
    table = load_xid_table()
    assert [code for code in MUST if code not in table.xids] == []
    assert {x.group for x in table.xids.values()} <= set(CLASSES.split())
    assert {x.severity for x in table.xids.values()} == set(SEVERITIES)
    assert [x.code for x in table.xids.values() if x.code in x.follows] == []


@pytest.mark.parametrize(
    ("code", "severity", "action"),
    [
        (79, "critical", "reboot node"),
        (48, "critical", "alone: reset GPU; with 63 or 64: drain and reset GPU"),
        (94, "warning", "restart app"),
        (119, "critical", "reset GPU"),
        (54, "critical", "check cabling and seating"),
        (13, "info", "restart app"),
    ],
)
def test_the_next_action_is_in_the_table(code: int, severity: str, action: str) -> None:
    assert (load_xid_table().find_xid(code).severity, load_xid_table().find_xid(code).action) == (severity, action)


def test_an_unknown_code_is_marked_as_unknown() -> None:
    found = load_xid_table().find_xid(4711)
    assert (found.name, found.group, found.severity) == ("unknown XID 4711", "unknown", "warning")
    assert load_xid_table().find_sxid(4711).name == "unknown SXid 4711"


def test_a_users_file_changes_the_keys_that_it_names_and_adds_codes(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'version = "7"\n[[xid]]\ncodes = [109, 31]\nseverity = "info"\n'
        '[[xid]]\ncodes = [200]\nname = "new"\nclass = "site"\nfollows = [79, "any"]\n'
        '[[sxid]]\ncodes = [20034]\nseverity = "warning"\n'
    )
    found, shipped = load_xid_table(own), load_xid_table()
    assert (found.find_xid(109).severity, found.find_xid(31).severity) == ("info", "info")
    assert found.find_xid(109).action == shipped.find_xid(109).action
    assert (found.find_xid(200).name, found.find_xid(200).group) == ("new", "site")
    assert found.find_xid(200).follows == {79, "any"}
    assert (found.find_sxid(20034).severity, found.find_sxid(20034).reach) == ("warning", "link")
    assert found.version == f"{shipped.version}, own.toml 7"
    assert shipped.find_xid(109).severity == "critical"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[[xid]]\ncodes = [79]\nseverity = 'fatal'",
            r"\[\[xid\]\] number 1: severity = 'fatal': expected one of info, w",
        ),
        ("[[xid]]\ncodes = [79]\nsevrity = 'info'", r"number 1: sevrity: unknown key; expected codes, name"),
        ("[[xid]]\nname = 'a'", r"number 1: codes = None: expected a list of codes such as \[79\]"),
        ("[[xid]]\ncodes = [true]", r"codes = \[True\]: expected a list of codes"),
        ("[[xid]]\ncodes = [1]\naction = ''", r"action = '': expected a text of 1 to 200"),
        ("[[xid]]\ncodes = [1]\nfollows = ['all']", r"follows = \['all'\]: expected a list of codes or \"any\""),
        (
            "[[sxid]]\ncodes = [1]\nreach = 'all'",
            r"\[\[sxid\]\] number 1: reach = 'all': expected one of none, link, f",
        ),
        ("[xid]\ncodes = [1]", r"xid: expected tables \[\[xid\]\]"),
        ("xids = 3", r"xids: unknown key; expected version, source, \[\[xid\]\]"),
        ("what", r"own\.toml: .*expected a readable TOML file"),
    ],
)
@pytest.mark.parametrize("collector", [KernelLog, XidEvents])
def test_a_wrong_file_is_refused_at_start_with_file_key_and_expectation(
    tmp_path: Path, text: str, says: str, collector: type[KernelLog | XidEvents]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(ConfigError, match=rf"own\.toml: .*{says}|{says}"):
        configured_collectors({collector.name: {"xid_table": str(own)}}, "f.toml")


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    message = (
        r"^f\.toml: \[collector\.kernel_log\] xid_table = '.*none\.toml': .*No such file.*expected a readable TOML file"
    )
    with pytest.raises(ConfigError, match=message):
        configured_collectors({"kernel_log": {"xid_table": str(tmp_path / "none.toml")}}, "f.toml")


def test_the_data_is_beside_the_code_so_that_the_wheel_includes_it() -> None:
    """Hatch packs every file of the packages that pyproject names."""
    beside = {path.name for data in (xid_table, kernel_patterns) for path in Path(data.__file__).parent.glob("*.toml")}
    assert beside == {"xid.toml", "nvlink.toml", "kernel_log.toml"}
