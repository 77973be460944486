"""The collector of the far end: results of the tools, tools that fail or hang, and a fabric that changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from agents.collector import NoData, Reading
from agents.collectors.fabric import fabric as shares
from agents.collectors.fabric import topology as views
from agents.collectors.fabric.fabric import Fabric
from agents.collectors.fabric.tool_output import LinkPeer, SwitchPort
from agents.collectors.fabric.topology import FabricTopology
from pipeline.model.records import SECOND, Event

LEAF, SPINE = "b0cf:0e03:0000:000a", "b0cf:0e03:0000:000f"
NOW = 1_800_000_000 * SECOND
MISSING = 2**64 - 1


def port(number: int, peer: str | None = None, state: int = 4, switch: str = LEAF, name: str = "leaf1") -> SwitchPort:
    far = LinkPeer(peer, 100 + number, 1, f"host of {peer}") if peer else None
    return SwitchPort(switch, name, 7, number, state, 5 if state == 4 else 2, 4.0, 400_000.0, far)


def summarize_events(events: list[Event]) -> list[tuple[str, str, object]]:
    return [(e.kind, e.entity, e.data.get("state", e.data.get("guid"))) for e in events]


# --- remembered ports ------------------------------------------------------------------------------------------------


def test_a_port_without_cable_is_ignored_and_a_lost_cable_is_reported_once() -> None:
    view = FabricTopology()
    assert view.update_links(NOW, [port(1, "a"), port(2, "b"), port(3, None, 1)]) == []
    assert list(view.entities.values()) == ["port:leaf1.1", "port:leaf1.2"]
    gone = [port(1, "a"), port(2, None, 1), port(3, None, 1)]
    assert summarize_events(view.update_links(NOW + SECOND, gone)) == [("link_state", "port:leaf1.2", "down")]
    assert view.update_links(NOW + 2 * SECOND, gone) == []
    assert view.inventory()["port:leaf1.2"].attributes["peer_guid"] == "b"  # names the cable to check
    assert summarize_events(view.update_links(NOW + 3 * SECOND, [port(2, "b")])) == [
        ("link_state", "port:leaf1.2", "up")
    ]


def test_a_changed_peer_is_an_event_and_its_old_port_drops_it() -> None:
    view = FabricTopology()
    view.update_links(NOW, [port(1, "a"), port(2, "b")])
    events = view.update_links(NOW, [port(1, "b"), port(2, None, 1)])
    assert ("link_peer", "port:leaf1.1", "b") in summarize_events(events)
    inventory = view.inventory()
    assert inventory["port:leaf1.1"].attributes["peer_guid"] == "b"
    assert "peer_guid" not in inventory["port:leaf1.2"].attributes


def test_the_inventory_changes_only_with_a_peer() -> None:
    view = FabricTopology()
    view.update_links(NOW, [port(1, "a")])
    assert view.inventory_changed()
    view.update_links(NOW, [port(1, "a")])
    assert not view.inventory_changed()
    view.update_links(NOW, [port(1, "b")])
    assert view.inventory_changed()


def test_a_leaf_without_its_hosts_stays_a_leaf_and_a_switch_without_hosts_is_a_spine() -> None:
    view = FabricTopology()
    up = [port(1, "a"), port(9, SPINE), port(1, LEAF, switch=SPINE, name="spine1")]
    view.update_links(NOW, up)
    assert view.inventory()["port:leaf1.1"].parents == ("leaf:leaf1",)
    assert view.inventory()["port:spine1.1"].parents == ("spine:spine1",)
    view.update_links(NOW, [port(1, None, 1), *up[1:]])
    assert view.inventory()["port:leaf1.9"].parents == ("leaf:leaf1",)


def test_a_switch_that_disappears_is_reported_and_its_ports_are_not_down() -> None:
    view = FabricTopology()
    spine = port(1, LEAF, switch=SPINE, name="spine1")
    view.update_links(NOW, [port(1, "a"), spine])
    assert summarize_events(view.update_links(NOW, [port(1, "a")])) == [("switch_state", "spine:spine1", "gone")]
    assert view.update_links(NOW, [port(1, "a")]) == []
    assert summarize_events(view.update_links(NOW, [port(1, "a"), spine])) == [("switch_state", "spine:spine1", "seen")]


def test_events_of_a_failing_fabric_are_bounded_per_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "MAX_EVENTS", 10)
    view = FabricTopology()
    view.update_links(NOW, [port(n, f"h{n}") for n in range(1, 26)])
    down = [port(n, None, 1) for n in range(1, 26)]
    counts = [len(view.update_links(NOW + k * SECOND, down)) for k in range(1, 5)]
    assert counts == [10, 10, 5, 0]


def test_more_ports_than_fit_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MAX_PORTS", 3)
    view = FabricTopology()
    view.update_links(NOW, [port(n, f"h{n}") for n in range(1, 6)])
    assert (len(view.entities), view.left_out) == (3, 2)


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [(("leaf*",), (), ["port:leaf1.1"]), ((), ("leaf*",), ["port:spine1.1"]), (("leaf1",), ("*",), ["port:leaf1.1"])],
)
def test_switches_are_selected_by_name(include: tuple[str, ...], exclude: tuple[str, ...], kept: list[str]) -> None:
    view = FabricTopology(include, exclude)
    view.update_links(NOW, [port(1, "a"), port(1, LEAF, switch=SPINE, name="spine1")])
    assert list(view.entities.values()) == kept


def test_switches_with_the_same_name_are_named_by_guid() -> None:
    view = FabricTopology()
    view.update_links(NOW, [port(1, "a")])
    view.update_links(NOW, [port(1, "a"), port(1, "b", switch=SPINE)])
    assert set(view.entities.values()) == {"port:b0cf0e030000000a.1", "port:b0cf0e030000000f.1"}
    assert set(view.inventory()) >= set(view.entities.values())


# --- tools -----------------------------------------------------------------------------------------------------------


class Tools:
    """A folder of commands that print files, or run the test's script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.links([1, 2])
        self.counters("")
        self.script("ibnetdiscover", "exit 0")

    def script(self, tool: str, body: str) -> None:
        fresh = self.folder / f"{tool}.new"
        fresh.write_text(f"#!/bin/sh\n{body}\n")
        fresh.chmod(0o755)
        fresh.replace(self.folder / tool)

    def links(self, ports: list[int]) -> None:
        lines = [
            f'0xb0cf0e030000000a "leaf1"      7   {n:2}[  ] ==( 4X       106.25 Gbps Active/  LinkUp)==>  '
            f'0x00000000000000{n:02x}    {100 + n}    1[  ] "n{n} mlx5_0" ( )'
            for n in ports
        ]
        self.script("iblinkinfo", "cat <<'END'\n" + "\n".join(lines) + "\nEND")

    def counters(self, errors: str, end: str = "", talk: str = "") -> None:
        data = "\n".join(
            f"   GUID 0xb0cf0e030000000a port {n}: [PortXmitData == {n}] [PortRcvData == 7]" for n in (1, 2)
        )
        self.script(
            "ibqueryerrors",
            f"case \"$*\" in *--counters*) cat <<'END'\n{data}\nEND\n;; *) cat <<'END'\n{errors}\n"
            f"## Summary: 1\n{end}\nEND\ncat >&2 <<'END'\n{talk}\nEND\n;; esac",
        )


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path / "tools")


@pytest.fixture
def collector(tools: Tools) -> Iterator[Fabric]:
    made = Fabric(enabled=True, tools=tools.folder, links_every=0.05, counters_every=0.05, topology_every=0.2)
    made.open("n1")
    yield made
    made.close()


def await_reading(collector: Fabric, holds: Callable[[Reading], bool]) -> Reading:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for reading in collector.read():
            if holds(reading):
                return reading
        time.sleep(0.02)
    raise TimeoutError("waited 10 s for a reading as wanted")


def counted(reading: Reading) -> bool:
    return "nic.symbol_errors" in reading.columns


def test_it_is_disabled_by_default() -> None:
    assert not Fabric().has_work()
    assert Fabric(enabled=True).has_work()
    with pytest.raises(NoData, match="set `enabled = true`"):
        Fabric().open("n1")


def test_a_missing_tool_is_reported_with_its_fix(tmp_path: Path) -> None:
    with pytest.raises(NoData, match=f"{tmp_path}/iblinkinfo: not found; install infiniband-diags"):
        Fabric(enabled=True, tools=tmp_path).open("n1")


def test_errors_that_are_not_printed_are_zero_and_traffic_is_in_bytes(tools: Tools, collector: Fabric) -> None:
    tools.counters("   GUID 0xb0cf0e030000000a port 2: [SymbolErrorCounter == 5]")
    reading = await_reading(collector, lambda r: counted(r) and r.columns["nic.symbol_errors"].tolist() == [0, 5])
    assert reading.entities == ("port:leaf1.1", "port:leaf1.2")
    assert reading.columns["nic.tx_bytes"].tolist() == [4, 8]
    assert reading.columns["nic.rx_packets"].tolist() == [MISSING, MISSING]  # without a reported value


def test_a_port_without_response_is_missing_and_not_zero(tools: Tools, collector: Fabric) -> None:
    tools.counters("", "##          1 PMA query failures", "ibwarn: query failed on leaf1, Lid 7 port 2")
    reading = await_reading(collector, lambda r: counted(r) and r.columns["nic.symbol_errors"][1] == MISSING)
    assert reading.columns["nic.symbol_errors"].tolist() == [0, MISSING]


def test_a_saturated_classic_counter_is_reported_once_and_a_wide_one_never(tools: Tools, collector: Fabric) -> None:
    tools.counters("   GUID 0xb0cf0e030000000a port 2: [SymbolErrorCounter == 65535] [LinkDownedCounter == 255]")
    reading = await_reading(collector, lambda r: any(e.kind == "counter_saturated" for e in r.events))
    found = {(e.entity, e.data["signal"]) for e in reading.events}
    assert ("port:leaf1.2", "nic.symbol_errors") in found
    tools.counters("   GUID 0xb0cf0e030000000a port 2: [SymbolErrorCounter == 70000] [PortRcvErrors == 65535]")
    for _ in range(3):
        seen = await_reading(collector, lambda r: counted(r) and r.columns["nic.symbol_errors"][1] == 70000)
        assert not [e for e in seen.events if e.data.get("signal") == "nic.symbol_errors"]


def test_each_result_is_returned_once_and_a_read_does_not_wait(collector: Fabric) -> None:
    await_reading(collector, counted)
    began = time.monotonic()
    for _ in range(50):
        collector.read()
    assert time.monotonic() - began < 2.0  # reads that wait for the next result would take 50 times 0.05 s


def test_a_failing_tool_is_reported_once_and_again_when_it_works(tools: Tools, collector: Fabric) -> None:
    await_reading(collector, counted)
    tools.script("ibqueryerrors", "echo 'ibwarn: no answer from port 1' >&2; exit 1")
    failing = await_reading(collector, lambda r: any(e.kind == "fabric_tool" for e in r.events))
    (event,) = (e for e in failing.events if e.kind == "fabric_tool")
    assert (event.entity, event.data["tool"], event.data["state"]) == ("node:n1", "ibqueryerrors", "failing")
    assert "exit status 1: ibwarn: no answer from port 1" in event.data["reason"]
    tools.counters("")
    works = await_reading(collector, lambda r: any(e.kind == "fabric_tool" for e in r.events))
    assert [e.data["state"] for e in works.events if e.kind == "fabric_tool"] == ["ok"]


def test_an_unreadable_fabric_is_no_data_from_the_start_with_a_stable_reason(tools: Tools) -> None:
    collector = Fabric(enabled=True, tools=tools.folder, links_every=0.02)
    reasons = []

    def refused(look: Callable[[], object]) -> None:
        with pytest.raises(NoData, match=r"can't open UMAD port.*expected an active InfiniBand port and access") as no:
            look()
        reasons.append(str(no.value))
        collector.close()

    collector.open("n1")
    tools.script("iblinkinfo", 'echo "ibpanic: [$$] main: can\'t open UMAD port ((null):0)" >&2; exit 1')
    refused(lambda: await_reading(collector, lambda r: False))
    for _ in range(2):
        refused(lambda: collector.open("n1"))
    assert reasons == [reasons[0]] * 3


def test_a_read_does_not_wait_for_a_slow_tool(tools: Tools) -> None:
    tools.script("iblinkinfo", "exec sleep 30")
    collector = Fabric(enabled=True, tools=tools.folder, deadline=0.4)
    began = time.monotonic()
    collector.open("n1")
    assert collector.read() == ()
    collector.close()
    assert time.monotonic() - began < 3.0


def test_known_ports_survive_a_period_without_data(tools: Tools, collector: Fabric) -> None:
    await_reading(collector, counted)
    collector.close()
    tools.links([1])
    collector.open("n1")
    reading = await_reading(collector, lambda r: "nic.state" in r.columns)
    assert reading.entities == ("port:leaf1.1", "port:leaf1.2")
    np.testing.assert_array_equal(reading.columns["nic.state"], [1, np.nan])


# --- many ports ------------------------------------------------------------------------------------------------------


def test_more_ports_than_a_message_holds_are_returned_in_rotating_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "SLICE_PORTS", 3)
    share, entities = shares.PortSlices(), tuple(f"port:leaf1.{n}" for n in range(8))
    seen: list[tuple[str, ...]] = []
    for look in range(6):
        if look in (0, 2):  # a newer answer comes before the older one was given whole
            share.replace(entities, {"nic.state": np.arange(8)})
        for names, columns in share.next_slice():
            assert columns["nic.state"].tolist() == [int(name.rpartition(".")[2]) for name in names]
            seen.append(names)
    assert [len(names) for names in seen] == [3, 3, 2, 3, 3]
    assert set(sum(seen[:3], ())) == set(sum(seen[2:], ())) == set(entities)
    share.replace(entities[:2], {"nic.state": np.arange(2)})
    assert [names for names, _ in share.next_slice()] == [entities[:2]]


def test_a_port_in_neither_run_is_missing_and_not_zero(tools: Tools, collector: Fabric) -> None:
    tools.links([1, 2, 3])
    reading = await_reading(collector, lambda r: counted(r) and len(r.entities) == 3)
    assert reading.columns["nic.symbol_errors"].tolist() == [0, 0, MISSING]
    assert reading.columns["nic.tx_bytes"].tolist() == [4, 8, MISSING]
