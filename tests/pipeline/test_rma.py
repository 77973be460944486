"""The RMA packet: its content, data that it never has, and the page that a vendor reads first."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from pipeline.objectives.rma import collect_packet, find_subject, redact
from pipeline.objectives.rma_files import make_zip, name_file, write_csv, write_summary
from pipeline.store.database import Database

ONSET = 1_790_000_000 * SECOND
HOUR = 3600 * SECOND
NOW = ONSET + 5 * HOUR
TOPOLOGY = Topology(
    {
        **{f"gpu:n1.{g}": ("node:n1",) for g in range(4)},
        "node:n1": ("rack:r1",),
        "gpu:n2.0": ("node:n2",),
        "rank:81.0": ("gpu:n1.2", "job:81"),
    }
)
HOSTILE = "<img src=x onerror=alert(1)>"


def event(connection: Any, kind: str, entity: str, minutes: int, **data: Any) -> None:
    connection.execute(
        "INSERT INTO events VALUES (make_timestamptz($1::BIGINT), $2, $3, $4, 's', 'n1', false, NULL)",
        [ONSET + minutes * 60 * SECOND, entity, kind, json.dumps(data)],
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with closing(Database(tmp_path_factory.mktemp("rma") / "store.duckdb")) as made:
        c = made.connection
        c.execute(
            """INSERT INTO incidents SELECT 'INC-7', 'gpu:n1.2', t, t, NULL, 'page', ['gpu:n1.2'], 0.97, 'open',
               'GPU 2 of n1: XID 95, uncontained memory error', false, 'memory', 'gpu:n1.2', t,
               '{"assignee": "alice@example.com"}', '{}' FROM (SELECT make_timestamptz($1::BIGINT) AS t)""",
            [ONSET],
        )
        c.execute("INSERT INTO history VALUES ('INC-7', 1, now(), 'commented', 'alice@example.com', 'of Acme', '{}')")
        gpu = {"sku": "NVIDIA H100", "serial": "1652923", "uuid": "GPU-1", "vbios": "96.00.61", "slot": 3}
        node = {"product_serial": "SN-77", "bios": "1.2", "hostname_token": "hunter2", "os": "secret os"}
        for entity, facts in (("gpu:n1.2", gpu), ("node:n1", node)):
            c.execute(
                """INSERT INTO entity (entity, kind, site, simulated, parents, attributes)
                   VALUES ($1, 'x', 's', false, [], $2)""",
                [entity, json.dumps(facts)],
            )
        text = f"NVRM: Xid (PCI:0000:3b:00): 95, password=hunter2 {HOSTILE}"
        event(c, "xid", "gpu:n1.2", 0, xid=95, name="Uncontained", text=text, pid=4711, root="/host")
        event(c, "job_start", "job:81", -5, user="bob", name="acme-secret-model")
        event(c, "digest", "gpu:n1.2", 30, canary="matmul", digest="b2", expected="a1", wrong=["bf16-plain"])
        event(c, "digest", "gpu:n1.2", 40, canary="matmul", digest="a1", expected="a1")
        for g in range(4):
            c.execute("INSERT INTO device VALUES ('gpu', $1, 's', $2, 'n1', false)", [g, f"gpu:n1.{g}"])
            for minute in range(-60, 61, 10):
                errors = 40 if g == 2 and minute > 0 else 3
                c.execute(
                    """INSERT INTO hot_gpu (time, device, late, temperature, ecc_uncorrected)
                       VALUES (make_timestamptz($1::BIGINT), $2, false, $3, $4)""",
                    [ONSET + minute * 60 * SECOND, g, 60 + g + (20 if g == 2 and minute >= 0 else 0), errors],
                )
        c.execute(
            """INSERT INTO findings VALUES (now(), now(), 'gpu:n1.2', 'memory', 'page', 1, 's', '{}',
               ['gpu.temperature'],
               'INC-7')"""
        )
        output = {
            "targets": {"node:n1": {"done": True, "output": "dcgmi diag -r 3: pass\nAuthorization: Bearer abc.def"}}
        }
        document = json.dumps({"params": {"level": "3"}, "result": output})
        c.execute(
            """INSERT INTO acts SELECT 'ACT-1', 'ACT-1', 'verified', 'diagnose', ['node:n1'], 'INC-7', 'alice', t, t, t,
               1,
               false, $2 FROM (SELECT make_timestamptz($1::BIGINT) AS t)""",
            [ONSET + HOUR, document],
        )
        for number, state, result in ((2, "expired", "{}"), (3, "executed", '{"dry_run": true}')):  # never ran
            c.execute(
                """INSERT INTO acts SELECT $2, $2, $3, 'diagnose', ['node:n1'], 'INC-7', 'alice', t, t, t, 1, false, $4
                   FROM (SELECT make_timestamptz($1::BIGINT) AS t)""",
                [ONSET + HOUR, f"ACT-{number}", state, f'{{"params": {{"level": "3"}}, "result": {result}}}'],
            )
        yield made


@pytest.fixture(scope="module")
def packet(database: Database) -> dict[str, Any]:
    subject = find_subject(database.connection, TOPOLOGY, "INC-7", NOW)
    return collect_packet(database.connection, TOPOLOGY, subject, 24, NOW, "site-1")


@pytest.mark.slow
def test_the_packet_has_identity_errors_counters_peers_and_tests(packet: dict[str, Any]) -> None:
    gpu = packet["identity"][0]
    assert (gpu["name"], gpu["serial"], gpu["slot"], gpu["vbios"]) == ("GPU 2 of n1", "1652923", 3, "96.00.61")
    assert packet["identity"][1]["product_serial"] == "SN-77"
    assert packet["events"][0]["xid"] == 95
    assert packet["events"][0]["text"].startswith("NVRM: Xid (PCI:0000:3b:00): 95")
    counter = packet["counters"][0]
    assert (counter["signal"], counter["first"], counter["before"], counter["after"]) == (
        "gpu.ecc_uncorrected",
        3,
        3,
        40,
    )
    assert (packet["peers"]["signal"], packet["peers"]["peers"]) == ("gpu.temperature", 3)
    assert packet["canaries"] == [
        {"entity": "gpu:n1.2", "canary": "matmul", "reports": 2, "wrong": 1, "last": iso(ONSET + 40 * 60 * SECOND)}
    ]
    assert [(d["level"], d["passed"]) for d in packet["diagnostics"]] == [("3", True)]
    assert packet["part_of"] == {"rack": "rack:r1"}


def test_no_secret_person_job_or_comment_is_in_any_file(packet: dict[str, Any]) -> None:
    with zipfile.ZipFile(io.BytesIO(make_zip(packet))) as made:
        text = "".join(made.read(name).decode() for name in made.namelist())
    for word in ("hunter2", "secret os", "abc.def", "alice", "bob", "acme", "Acme", "4711", "/host", "INVALID"):
        assert word not in text, word
    assert text.count("[removed]") >= 2


def test_all_gpus_of_a_node_are_identified_also_beside_hundreds_of_links(tmp_path: Path) -> None:
    gpus, ports = [f"gpu:n9.{g}" for g in range(8)], [f"port:n9.mlx5_{p}" for p in range(80)]
    links = [f"nvlink:n9.{g}.{link}" for g in range(8) for link in range(18)]
    topology = Topology(dict.fromkeys([*links, *ports, *gpus], ("node:n9",)))
    with closing(Database(tmp_path / "store.duckdb")) as database:
        for number, entity in enumerate([*gpus, *ports]):
            database.connection.execute(
                """INSERT INTO entity (entity, kind, site, simulated, parents, attributes)
                   VALUES ($1, 'x', 's', false, [], $2)""",
                [entity, json.dumps({"serial": f"S{number}"})],
            )
        subject = find_subject(database.connection, topology, "n9", NOW)
        packet = collect_packet(database.connection, topology, subject, 24, NOW, "site-1")
    assert [row["serial"] for row in packet["identity"][1:9]] == [f"S{g}" for g in range(8)]
    html = write_summary(packet, "")
    assert all(f"GPU {g} of n9" in html for g in range(8))
    assert "16 more: packet.json" in html


def test_the_summary_is_one_page_whose_texts_are_escaped(packet: dict[str, Any]) -> None:
    with zipfile.ZipFile(io.BytesIO(make_zip(packet))) as made:
        assert made.namelist() == ["summary.html", "packet.json", "counters.csv", "events.jsonl", "peers.svg"]
        html, chart = made.read("summary.html").decode(), made.read("peers.svg").decode()
        rows = list(csv.DictReader(io.StringIO(made.read("counters.csv").decode())))
    assert HOSTILE not in html
    assert "&lt;img src=x" in html
    for word in (
        "GPU 2 of n1",
        "1652923",
        "XID 95",
        escape(CATALOGUE["gpu.ecc_uncorrected"].help),
        "canary matmul",
        "diagnostic level 3",
        "rack r1",
    ):
        assert word in html
    assert ElementTree.fromstring(chart).tag.endswith("svg")
    assert rows[0]["signal"] == "gpu.ecc_uncorrected"
    assert make_zip(packet) == make_zip(packet)
    assert name_file(packet) == "rma-n1-20260921T1413.zip"
    assert name_file({**packet, "node": 'n"\r\n/../x'}).startswith("rma-n____.._x-2026")


def test_a_simulated_device_without_a_serial_number_says_both(packet: dict[str, Any]) -> None:
    assert (packet["simulated"], packet["site"]) == (False, "site-1")
    bare = {**packet["identity"][0]}
    del bare["serial"]
    html = write_summary({**packet, "simulated": True, "identity": [bare, *packet["identity"][1:]]}, "")
    assert "site-1: SIMULATED, for practice" in html
    assert "serial number of GPU 2 of n1: it reports none" in html
    assert "reports none" not in write_summary(packet, "")


def test_errors_come_before_traffic_and_the_chart_is_of_the_time_with_values(packet: dict[str, Any]) -> None:
    changed = [row["unit"] == "{error}" for row in packet["counters"] if row["changed"]]
    assert changed == sorted(changed, reverse=True)
    assert len(packet["peers"]["points"]) == 13, "a row each 10 minutes, not three in one of 24 h"
    rise = next(point[0] for point in packet["peers"]["points"] if point[1] > 70)
    assert rise >= packet["peers"]["onset"]


def test_a_node_or_a_device_finds_its_newest_incident_and_an_unknown_one_is_refused(database: Database) -> None:
    c = database.connection
    for name in ("n1", "node:n1", "gpu:n1.2"):
        assert find_subject(c, TOPOLOGY, name, NOW).incident == "INC-7"
    other = find_subject(c, TOPOLOGY, "n2", NOW)
    assert (other.entity, other.incident, other.onset) == ("node:n2", "", NOW)
    bare = collect_packet(c, TOPOLOGY, other, 1, NOW, "s")
    assert (bare["events"], bare["peers"], bare["counters"]) == ([], None, [])
    assert "no incident is known" in write_summary(bare, "")
    with pytest.raises(KeyError):
        find_subject(c, TOPOLOGY, "n404", NOW)
    c.execute(
        """INSERT INTO incidents SELECT 'INC-8', 'cdu:c1', t, t, NULL, 'page', ['cdu:c1'], 1, 'open', 's', false,
           'coolant', 'cdu:c1', t, '{}', '{}' FROM (SELECT make_timestamptz($1::BIGINT) AS t)""",
        [ONSET],
    )
    with pytest.raises(UsageError, match="is on no node; name the device or node instead"):
        find_subject(c, TOPOLOGY, "INC-8", NOW)


@pytest.mark.parametrize(
    "text",
    [
        "password: hunter2x",
        "API_KEY=hunter2x",
        "Authorization: hunter2x",
        "https://u:hunter2x@host/",
        "whsec_hunter2xyz",
        "token hunter2x",
    ],
)
def test_what_looks_like_a_secret_is_removed(text: str) -> None:
    assert "hunter2" not in json.dumps(redact({"a": [text, 5]}))
    assert redact("XID 79, GPU has fallen off the bus") == "XID 79, GPU has fallen off the bus"


def test_a_cell_that_a_spreadsheet_would_run_is_quoted() -> None:
    assert write_csv([{"a": "=1+1", "b": None}], ("a", "b")) == "a,b\n'=1+1,\n"
