"""The table of XIDs as data: complete, versioned, and changed by a file of the user key by key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from agents.collectors.gpu import xid_table
from agents.collectors.gpu.xid import XidEvents
from agents.collectors.gpu.xid_table import SEVERITIES, SHIPPED, load
from agents.collectors.host import kernel_patterns
from agents.collectors.host.kernel_log import KernelLog
from agents.collectors.registry import configured
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
    table = load()
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
def test_what_is_done_first(code: int, severity: str, action: str) -> None:
    assert (load().xid(code).severity, load().xid(code).action) == (severity, action)


def test_an_unknown_code_is_told_as_such() -> None:
    found = load().xid(4711)
    assert (found.name, found.group, found.severity) == ("unknown XID 4711", "unknown", "warning")
    assert load().sxid(4711).name == "unknown SXid 4711"


def test_a_users_file_changes_the_keys_that_it_names_and_adds_codes(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'version = "7"\n[[xid]]\ncodes = [109, 31]\nseverity = "info"\n'
        '[[xid]]\ncodes = [200]\nname = "new"\nclass = "site"\nfollows = [79, "any"]\n'
        '[[sxid]]\ncodes = [20034]\nseverity = "warning"\n'
    )
    found, shipped = load(own), load()
    assert (found.xid(109).severity, found.xid(31).severity) == ("info", "info")
    assert found.xid(109).action == shipped.xid(109).action
    assert (found.xid(200).name, found.xid(200).group) == ("new", "site")
    assert found.xid(200).follows == {79, "any"}
    assert (found.sxid(20034).severity, found.sxid(20034).reach) == ("warning", "link")
    assert found.version == f"{shipped.version}, own.toml 7"
    assert shipped.xid(109).severity == "critical"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[[xid]]\ncodes = [79]\nseverity = 'fatal'",
            r"\[\[xid\]\] number 1: severity = 'fatal': wanted one of info, w",
        ),
        ("[[xid]]\ncodes = [79]\nsevrity = 'info'", r"number 1: sevrity: no such key; wanted codes, name"),
        ("[[xid]]\nname = 'a'", r"number 1: codes = None: wanted a list of codes such as \[79\]"),
        ("[[xid]]\ncodes = [true]", r"codes = \[True\]: wanted a list of codes"),
        ("[[xid]]\ncodes = [1]\naction = ''", r"action = '': wanted a text of 1 to 200"),
        ("[[xid]]\ncodes = [1]\nfollows = ['all']", r"follows = \['all'\]: wanted a list of codes or \"any\""),
        ("[[sxid]]\ncodes = [1]\nreach = 'all'", r"\[\[sxid\]\] number 1: reach = 'all': wanted one of none, link, f"),
        ("[xid]\ncodes = [1]", r"xid: wanted tables \[\[xid\]\]"),
        ("xids = 3", r"xids: no such key; wanted version, source, \[\[xid\]\]"),
        ("what", r"own\.toml: .*wanted a readable TOML file"),
    ],
)
@pytest.mark.parametrize("collector", [KernelLog, XidEvents])
def test_a_wrong_file_is_refused_at_start_with_file_key_and_what_is_wanted(
    tmp_path: Path, text: str, says: str, collector: type[KernelLog | XidEvents]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(ConfigError, match=rf"own\.toml: .*{says}|{says}"):
        configured({collector.name: {"xid_table": str(own)}}, "f.toml")


def test_an_absent_file_is_refused_at_start(tmp_path: Path) -> None:
    said = (
        r"^f\.toml: \[collector\.kernel_log\] xid_table = '.*none\.toml': .*No such file.*wanted a readable TOML file"
    )
    with pytest.raises(ConfigError, match=said):
        configured({"kernel_log": {"xid_table": str(tmp_path / "none.toml")}}, "f.toml")


def test_the_data_lies_beside_the_code_so_that_the_wheel_holds_it() -> None:
    """Hatch packs every file of the packages that pyproject names."""
    beside = {path.name for data in (xid_table, kernel_patterns) for path in Path(data.__file__).parent.glob("*.toml")}
    assert beside == {"xid.toml", "nvlink.toml", "kernel_log.toml"}
