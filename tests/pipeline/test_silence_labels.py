"""Labels of incidents for matchers: where its devices are, not those that suffer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.sections import ModeRule
from pipeline.incidents.jobs import Places
from pipeline.incidents.matchers import parse_matchers
from pipeline.incidents.reach import find_reach
from pipeline.incidents.silences import collect_labels, make_scope_matchers
from pipeline.judging.mutes import FindingFilter, Mute
from pipeline.model.places import guess_node_by_name
from pipeline.model.records import Finding, Incident
from pipeline.model.topology import Topology
from pipeline.notify.alertmanager import locate_entity
from tests.pipeline.living import HOUR, LivingSite

PARENTS = {
    **{f"gpu:n{n}.0": (f"node:n{n}",) for n in range(3)},
    **{f"node:n{n}": (f"rack:r{n // 2}",) for n in range(3)},
    **{f"rank:1.{n}": ("job:1", f"gpu:n{n}.0") for n in range(3)},
    "rack:r0": ("cdu:c1",),
    "rack:r1": ("cdu:c1",),
}


def labels(cause: str, *members: str) -> dict[str, tuple[str, ...]]:
    one = Incident("inc-1", cause, 0, 0, "page", "x", "thermal", cause, members)
    return collect_labels(one, Topology(PARENTS), "s")


def test_a_job_that_suffers_takes_no_label_of_the_place_away() -> None:
    found = labels("rack:r0", "gpu:n0.0", "gpu:n1.0", "job:1", "rank:1.2")
    assert (found["rack"], found["cdu"], found["scope"]) == (("r0",), ("c1",), ("rack:r0", "cdu:c1", "site:s"))


@pytest.mark.parametrize(
    ("device", "node", "rack"),
    [
        ("gpu:n9.0", "n9", ()),
        ("gpu:n1.7", "n1", ("r0",)),  # the topology has its node
        ("gpu:n1.amd7", "n1", ("r0",)),
        ("cpu:n1.11", "n1", ("r0",)),
        ("nvlink:n1.3.0", "n1", ("r0",)),
        ("nvlink:n9.3.0", "n9", ()),
        ("neuroncore:n1.neuron0.1", "n1", ("r0",)),
        ("dimm:n1.mc0.dimm1", "n1", ("r0",)),
        ("disk:n1.sda", "n1", ("r0",)),
        ("gpu:a.b.0", "a.b", ("r7",)),
        ("nvlink:a.b.3.0", "a.b", ("r7",)),
        ("gpu:a.c.0", None, ()),  # on a.c, which the topology does not have; not on a
        ("gpu:a.b.c.0", None, ()),
        ("gpu:a.x", None, ()),  # no name of a GPU
        ("nvlink:a.c.3.0", None, ()),
        ("nvlink:a.3", None, ()),
        ("cpu:a.c.0", None, ()),
        ("dimm:a.c.mc0.dimm1", None, ()),
        ("disk:a.b.sda", None, ()),  # sda of a.b, or b.sda of a
        ("port:n1.mlx5_0.2", "n1", ("r0",)),
        ("port:n9.mlx5_bond_0", "n9", ()),
        ("port:n9.bnxt_re1", "n9", ()),
        ("port:a.b.mlx5_0", "a.b", ("r7",)),
        ("port:a.c.mlx5_0", None, ()),
        ("port:n1.eth0", None, ()),  # a port of the node n1, or of a switch
        ("port:n1.Ethernet1/1", None, ()),
        ("port:n1.mlx5_0x", None, ()),
        ("nic:n1.mlx5_0", None, ()),  # no collector has such names
        ("sensor:n1.ipmi.Inlet_Temp", "n1", ("r0",)),
        ("sensor:a.c.ipmi.Inlet", None, ()),
        ("sensor:n1.acpitz.temp1", None, ()),
        ("psu:a.c.1", None, ()),
        ("port:l7.4", None, ()),  # a port of a switch
        ("sensor:hall.temp", None, ()),
        ("gpu:x.0", None, ("r7",)),  # its inventory has no node
        ("gpu:n9", None, ()),
        ("gpu:.0", None, ()),
    ],
)
def test_a_device_without_inventory_has_the_labels_of_the_node_in_its_name(
    device: str, node: str | None, rack: tuple[str, ...]
) -> None:
    more = {"node:a": ("rack:r6",), "node:a.b": ("rack:r7",), "gpu:x.0": ("rack:r7",)}
    topology, one = Topology({**PARENTS, **more}), Incident("i", device, 0, 0, "page", "x", "y", device, (device,))
    found = collect_labels(one, topology, "s")
    assert (found.get("node"), found.get("rack", ())) == (node and (node,), rack)
    assert (f"node:{node}" in found["scope"]) == (node is not None)
    located = locate_entity(topology, device)
    assert (located.get("node"), located.get("rack")) == (node, rack[0] if rack else None)
    assert find_reach(device, (device,), topology, Places()).nodes == ({f"node:{node}"} if node else set())


def test_an_incident_of_a_job_alone_has_the_label_of_the_job() -> None:
    assert labels("job:1", "job:1")["job"] == ("1",)


@pytest.mark.parametrize(
    ("device", "node"),
    [
        ("gpu:n9.0", "node:n9"),
        ("gpu:a.c.0", "node:a.c"),  # most likely; a condition muted for it must be sure
        ("port:a.c.mlx5_0", "node:a.c"),
        ("port:n9.eth0", "node:n9"),
        ("psu:n9.1U.Bay1", "node:n9"),
        ("cdu:c1.1", None),
        ("gpu:x", None),
        ("gpu:n0.0", None),  # the topology has it
    ],
)
def test_the_most_likely_node_of_a_device_is_that_in_its_name(device: str, node: str | None) -> None:
    assert guess_node_by_name(device, Topology(PARENTS)) == node


def test_a_silence_and_a_window_of_a_node_hold_for_its_ports_without_inventory(tmp_path: Path) -> None:
    site = LivingSite(tmp_path / "store.duckdb")
    for matcher in ('node="n1"', 'scope="node:n2"'):
        site.people.add_silence("silence", parse_matchers([matcher]), None, site.now + HOUR, "new cables", "ann")
    ports = [site.report(f"port:{name}.mlx5_0", detector="link") for name in ("n1", "n2", "n3")]
    assert [site.state(port) for port in ports] == ["silenced", "silenced", "open"]
    assert site.alerts() == [(ports[2], "firing")]
    site.database.close()


def test_a_mute_of_a_node_mutes_its_devices_without_inventory_and_no_others() -> None:
    mutes = [Mute("m", "thermal", "node:n9", 0, 100, "why", "ann")]
    by_node = FindingFilter(Topology(PARENTS), mutes=mutes)
    found = [Finding(10, 10, entity, "thermal", "page", 1.0, "hot") for entity in ("gpu:n9.0", "gpu:n8.0", "gpu:n1.0")]
    assert [by_node.find_mute(one) is not None for one in found] == [True, False, False]


def test_a_window_of_the_site_of_the_pipeline_silences_everything_and_one_of_another_site_nothing(
    tmp_path: Path,
) -> None:
    site = LivingSite(tmp_path / "store.duckdb")
    site.people.add_silence("maintenance", make_scope_matchers(["site:other"]), None, site.now + HOUR, "power", "ann")
    before = site.report("gpu:n1.0")
    assert site.state(before) == "open"
    own = make_scope_matchers(["site:local", "rack:r9"])
    made = site.people.add_silence("maintenance", own, None, site.now + HOUR, "power", "ann")
    pages = [before, *(site.report(entity) for entity in ("gpu:n5.0", "rack:r0", "host:unknown", "job:7", "site:all"))]
    assert {site.state(page) for page in pages} == {"silenced"}
    assert [site.state(i.id) for i in site.people.preview_silence(own)] == ["silenced"] * len(pages)
    site.people.expire_silence(made.id, "ann")
    site.wait(16)
    assert {site.state(page) for page in pages} == {"open"}
    site.database.close()


def test_a_mute_or_mode_of_the_site_of_the_pipeline_covers_everything_after_nearer_scopes() -> None:
    found = [Finding(10, 10, entity, "thermal", "page", 1.0, "hot") for entity in ("gpu:n0.0", "gpu:n9.0", "site:all")]
    for name, expected in (("site:s", True), ("site:t", False)):
        mutes = [Mute("m", "thermal", name, 0, 100, "why", "ann")]
        by_site = FindingFilter(Topology(PARENTS), [ModeRule("record", scope=name)], mutes, site="s")
        assert [by_site.find_mute(one) is not None for one in found] == [expected] * 3
        assert [by_site.find_mode(one) == "record" for one in found] == [expected] * 3
    rules = [ModeRule("record", scope="site:s"), ModeRule("notify", scope="rack:r0"), ModeRule("act")]
    nearest = FindingFilter(Topology(PARENTS), rules, site="s")
    assert [nearest.find_mode(one) for one in found] == ["notify", "record", "record"]


@pytest.mark.parametrize(
    "device", ["gpu:n0.lab.0", "nvlink:n0.lab.3.0", "cpu:n0.sw.0", "port:n0.lab.mlx5_0", "psu:n0.sw.1"]
)
@pytest.mark.parametrize("scope", ["node:n0", "rack:r0"])
def test_a_mute_or_mode_of_a_node_leaves_devices_of_a_longer_named_one_that_is_unknown(device: str, scope: str) -> None:
    one = Finding(10, 10, device, "thermal", "page", 1.0, "hot")
    of_scope = [Mute("m", "thermal", scope, 0, 100, "why", "ann")]
    by_scope = FindingFilter(Topology(PARENTS), [ModeRule("record", scope=scope)], mutes=of_scope)
    assert by_scope.find_mute(one) is None
    assert by_scope.find_mode(one) == "notify"
