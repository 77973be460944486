"""The page of a node: identity, state with cause or affected, devices beside peers, events with their meaning."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from dashboards.devices.answers import EventItem, parse_comparison, parse_values
from dashboards.devices.happened import describe
from dashboards.node import tables
from dashboards.node.page import OUTLIER_NOW, find_outliers, recovery_text
from dashboards.node.tables import SIGNALS
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE, class_of_entity
from tests.dashboards.conftest import NOW, incident_table
from tests.dashboards.device_tables import (
    HOSTILE,
    _signal_values,
    compare_table,
    empty_caches,
    serve_node,
    values_table,
)
from tests.dashboards.quality_tables import quality_table
from tests.dashboards.test_dashboard_acts import act_table
from tests.dashboards.test_dashboard_pages import page, shown


def node_script() -> None:
    from dashboards.node import page

    page.page()


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    empty_caches()


def test_all_signals_of_the_page_exist() -> None:
    assert set(SIGNALS) <= CATALOGUE.keys()
    assert len(set(SIGNALS)) <= 64


def test_a_node_shows_who_it_is_and_what_is_wrong(api: Any) -> None:
    serve_node(api)
    text = shown(page(node_script, entity="node:n003", live="0"))
    for expected in (
        "NODE CRITICAL",
        "Suspected cause:",
        'Affected by <a class="fp-link" href="facility?entity=cdu%3Ac1',
        "BOARD-7",
        'href="jobs?entity=job%3A81',
        "within=rack%3Ar1",
        "GPU 3 of n003: reset GPU (NVML_GPU_RECOVERY_ACTION_GPU_RESET)",
        "above its peers",
        "XID 79",
        "GPU has fallen off the bus. Do: reboot node, then RMA.",
        "12 messages of samples lost: spool full",
        "leaf switch l1</a>, far end not monitored",
        "Past incidents",
    ):
        assert expected in text
    assert text.count("Suspected cause of an unresolved incident.") == 1
    assert (
        len({path for path, _ in api.asked}) <= 7
    )  # each costs a round trip; acts and quality are shared by all nodes


def test_a_device_of_a_node_stands_on_top(api: Any) -> None:
    serve_node(api)
    text = shown(page(node_script, entity="gpu:n003.3", live="0"))
    assert "GPU 3 of n003" in text
    assert "Against its peers" in text
    assert "SN3" in text
    assert 'href="node?entity=node%3An003' in text


@pytest.mark.parametrize(
    ("state", "own", "badge"),
    [
        ("ok", [("page", "affected")], "GPU AFFECTED"),
        ("critical", [("page", "member")], "GPU AFFECTED"),
        ("critical", [], "GPU OK"),
        ("ok", [("page", "affected"), ("watch", "cause")], "GPU WATCH"),
        ("no_data", [("page", "affected"), ("ticket", "cause")], "GPU NO DATA"),
        ("no_data", [("page", "cause")], "GPU CRITICAL"),
    ],
)
def test_the_badge_of_a_device_is_its_own_state(api: Any, state: str, own: list[tuple[str, str]], badge: str) -> None:
    serve_node(api)
    entity = api.tables["entity"]
    found = [
        {**incident_table(f"I{i}", severity=severity, cause="cdu:c1"), "relation": relation}
        for i, (severity, relation) in enumerate(own)
    ]
    api.tables["entity"] = lambda query: {**entity(query), "incidents": found}
    api.fleet["nodes"] = [api.node("n003", state)]
    text = shown(page(node_script, entity="gpu:n003.3", live="0"))
    assert f">{badge}</span>" in text
    assert ">NODE " not in text


@pytest.mark.parametrize(
    ("age_s", "own", "badge", "said"),
    [
        (30, [], "GPU OK", "No unresolved incidents."),
        (10_800, [], "GPU NO DATA", "No data for 3 h 00 min from this device: what follows is the last known state."),
        (None, [], "GPU NO DATA", "No data yet from this device: what follows is the last known state."),
        (10_800, ["ticket"], "GPU NO DATA", "the last known state. Suspected cause of an unresolved incident."),
        (10_800, ["page"], "GPU CRITICAL", "the last known state. Suspected cause of an unresolved incident."),
    ],
)
def test_a_silent_device_of_a_live_node_is_never_ok(
    api: Any, age_s: int | None, own: list[str], badge: str, said: str
) -> None:
    serve_node(api)
    entity, values = api.tables["entity"], api.tables["values"]
    found = [{**incident_table(f"I{i}", severity=severity), "relation": "cause"} for i, severity in enumerate(own)]
    api.tables["entity"] = lambda query: {**entity(query), "incidents": found}

    def read(query: dict[str, list[str]]) -> Any:
        table = values(query)
        table["classes"][0]["last_seen"][3] = None if age_s is None else iso(NOW - age_s * SECOND)
        return table

    api.tables["values"] = read
    api.fleet["nodes"] = [api.node("n003", "ok")]
    text = shown(page(node_script, entity="gpu:n003.3", live="0"))
    assert f">{badge}</span>" in text
    assert said in text
    empty_caches()
    api.tables["values"] = lambda query: {**values(query), "classes": []}  # not read: nothing is known of it
    assert "NO DATA" not in shown(page(node_script, entity="gpu:n003.3", live="0"))


@pytest.mark.parametrize("entity", ["disk:n003.nvme0", "psu:n003.1", "port:n003.mlx5_0", "dimm:n003.A1"])
def test_the_silence_of_a_device_of_any_kind_is_read(entity: str) -> None:
    device_class = class_of_entity(entity)
    assert any(CATALOGUE[name].device_class == device_class for name in SIGNALS)
    own = {"device_class": device_class, "entities": [], "last_seen": [], "left_out": 0, "signals": []}
    assert tables.describe_silence(parse_values({"as_of": iso(NOW), "classes": [own]}), entity) == "no data yet"
    more = parse_values({"as_of": iso(NOW), "classes": [{**own, "left_out": 1}]})
    assert tables.describe_silence(more, entity) == tables.describe_silence(None, entity) == ""


@pytest.mark.parametrize(("affected_by", "badge"), [([], "NODE OK"), (["C3"], "NODE AFFECTED")])
def test_the_badge_of_a_node_says_affected_where_the_map_does(api: Any, affected_by: list[str], badge: str) -> None:
    serve_node(api)
    api.fleet["nodes"] = [{**api.node("n003", "ok", affected_by), "affected_by": affected_by}]
    assert f">{badge}</span>" in shown(page(node_script, entity="node:n003", live="0"))


def test_hostile_names_are_shown_as_text(api: Any) -> None:
    serve_node(api, HOSTILE)
    text = shown(page(node_script, entity=HOSTILE, live="0"))
    assert "<b>n" not in text
    assert "&lt;b&gt;n\N{SNOWMAN}&lt;/b&gt;" in text
    assert "<i>no driver" not in text


@pytest.mark.parametrize("asked", ["", "node:", ":n003"])
def test_an_address_without_an_entity_says_what_is_expected(api: Any, asked: str) -> None:
    assert "Expected a node or a device of it in the address" in shown(page(node_script, entity=asked))


def test_a_name_without_its_kind_is_a_node(api: Any) -> None:
    assert "Node n9 is not known." in shown(page(node_script, entity="n9"))


def test_an_unknown_node_is_not_found(api: Any) -> None:
    assert "Node n9 is not known." in shown(page(node_script, entity="node:n9"))


def test_a_node_without_gpus_says_so(api: Any) -> None:
    serve_node(api, gpus=0)
    assert "No GPU of this node has sent data" in shown(page(node_script, entity="node:n003", live="0"))


def test_the_last_known_node_stays_while_the_api_is_away(api: Any) -> None:
    serve_node(api)
    assert "Showing the last known state." not in shown(page(node_script, entity="node:n003", live="0"))
    for path in ("entity", "values", "compare", "events", "fleet"):
        api.broken[path] = (503, b'{"detail": "the store is not open"}')
    empty_caches()
    text = shown(page(node_script, entity="node:n003", live="0"))
    assert "Showing the last known state." in text
    assert "Unknown since" in text
    assert "No unresolved incidents." not in text


def test_the_driver_s_recovery_action_has_nvml_s_name() -> None:
    found = parse_values(values_table("node:n1", ["gpu.recovery_action"], "node:n1", 8))
    assert recovery_text(found) == "GPU 3 of n1: reset GPU (NVML_GPU_RECOVERY_ACTION_GPU_RESET)"


def test_a_line_that_left_its_peers_is_framed() -> None:
    query = {"from": [iso(NOW - 3600 * SECOND)], "to": [iso(NOW)], "entity": ["node:n1"], "signal": ["gpu.temperature"]}
    found = parse_comparison(compare_table(query, "node:n1", 8))
    # GPU i is at 60 + i, the band of the peers is 58 to 64, and half its width is tolerated
    assert find_outliers(found) == frozenset()
    found.signals[0].lines[7].values[-20:] = np.float32(80)
    assert find_outliers(found) == {("gpu:n1.7", "gpu.temperature")}
    found.signals[0].lines[7].values[-20:] = np.float32(62)
    found.signals[0].lines[5].values[-OUTLIER_NOW:] = np.float32(80)  # it began minutes ago
    assert find_outliers(found) == {("gpu:n1.5", "gpu.temperature")}
    found.signals[0].lines[5].values[-OUTLIER_NOW] = np.float32(62)  # a shorter one may be noise
    assert find_outliers(found) == frozenset()


def test_the_bmc_and_the_agent_of_a_node_have_their_own_state() -> None:
    table = values_table("node:n1", ["bmc.reachable", "agent.unsent", "agent.spool_wait"], "node:n1", 8)
    own = {"bmc": ["bmc:n1"], "agent": ["agent:n1"]}
    values = {"bmc.reachable": 0.0, "agent.unsent": 12.0, "agent.spool_wait": 0.0153}
    table["classes"] = [
        {
            "device_class": device_class,
            "entities": entities,
            "last_seen": [iso(NOW - (300 if device_class == "agent" else 0) * SECOND)],
            "left_out": 0,
            "signals": [
                {**_signal_values(name, entities), "values": [value]}
                for name, value in values.items()
                if name.startswith(device_class)
            ],
        }
        for device_class, entities in own.items()
    ]
    rows = dict(tables.health_rows(parse_values(table), NOW))
    assert "reachable" in rows["BMC"]
    assert "! no" in rows["BMC"]
    assert "no data for 5 min" in rows["Agent"]
    table["classes"][1]["last_seen"] = [iso(NOW)]
    text = dict(tables.health_rows(parse_values(table), NOW))["Agent"]
    assert re.search("unsent.*12.*spool wait.*15.3 ms", text)


def test_a_consequence_names_its_root() -> None:
    data = {"xid": 94, "name": "Contained memory error", "count": 3, "root": {"xid": 48, "entity": "gpu:n1.0"}}
    what, meaning = describe(EventItem(NOW, "event", "gpu:n1.0", "xid", data))
    assert what == "XID 94"
    assert meaning == "Contained memory error. 3 times. Consequence of XID 48."


def test_times_of_a_page_in_local_time_are_not_called_utc(api: Any) -> None:
    serve_node(api)
    text = shown(page(node_script, entity="node:n003", live="0", tz="local"))
    assert "Events, findings and data gaps" in text
    assert "UTC" not in text


def test_a_node_shows_its_acts_and_the_versions_that_most_nodes_do_not_run(api: Any) -> None:
    serve_node(api)
    own = act_table(targets=["node:n003"], held=["node:n003"], in_force=True, open=False, state="verified", plan=None)
    other = act_table(id="ACT-2", targets=["node:n009"], text="hold n009")
    api.answers["acts"] = {"acts": [own, other], "breaker": None, "modes": {}}
    versions = [
        {"name": "kernel", "version": "6.12", "nodes": 60, "examples": []},
        {"name": "kernel", "version": "6.8", "nodes": 4, "examples": []},
        {"name": "serial", "version": "BOARD-7", "nodes": 1, "examples": []},
    ]
    api.answers["quality"] = quality_table(versions=versions)
    text = shown(page(node_script, entity="node:n003", live="0"))
    assert "held: the scheduler gives it no new work" in text
    assert 'href="acts?id=ACT-1' in text
    assert "ACT-2" not in text
    assert "most of the fleet: 6.12" in text
    assert text.count("DIFFERS") == 1


def test_acts_that_cannot_be_read_are_not_said_to_be_none(api: Any) -> None:
    serve_node(api)
    api.broken["acts"] = (503, b'{"detail": "the store is busy"}')
    text = shown(page(node_script, entity="node:n003", live="0"))
    assert "Acts unavailable." in text
    assert "not held" not in text


@pytest.mark.parametrize(
    ("synchronized", "keeper", "said"),
    [
        (0, "", "not synchronized by NTP or PTP"),
        (0, "chronyd", "not synchronized, although chronyd runs"),
        (1, "chronyd", "synchronized by chronyd"),
        (1, "", "synchronized"),
    ],
)
def test_the_clock_of_a_node_is_said_in_words(synchronized: int, keeper: str, said: str) -> None:
    table = values_table("node:n003", ["node.clock_synchronized"], "node:n003", 8)
    (signal,) = (one["signals"][0] for one in table["classes"] if one["device_class"] == "node")
    assert signal["signal"]["states"] == ["not synchronized", "synchronized"]
    signal["values"] = [float(synchronized)]
    rows = dict(tables.node_rows(parse_values(table), NOW, keeper))
    assert f">{said}<" in rows["Clock"]
