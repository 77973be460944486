"""Several sources as one topology, errors in them, and the output of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fleetpulse
from pipeline.model.topology import ParentGraph
from pipeline.topology.check import check_against_telemetry, check_sources
from pipeline.topology.merge import merge_sources
from pipeline.topology.source import Naming, SourceTopology
from tests.pipeline.topology.conftest import CONF, IBNET, NETBOX, read

ROOT = Path(__file__).parents[3]


def csv(*lines: str) -> SourceTopology:
    return read("csv", "entity,parent\n" + "\n".join(lines) + "\n")


def test_the_first_source_that_names_a_kind_of_parent_decides_about_it_and_others_add_kinds() -> None:
    first, second = csv("node:n1,rack:r1"), csv("node:n1,rack:r2", "node:n1,leaf:l1", "node:n2,rack:r2")
    merged = merge_sources([("site", first), ("netbox", second)])
    assert merged.parents == {"node:n1": ("rack:r1", "leaf:l1"), "node:n2": ("rack:r2",)}
    assert merged.sources["node:n1", "leaf:l1"] == "netbox"
    [conflict] = merged.conflicts
    assert (conflict.by, conflict.used, conflict.other_by, conflict.other) == (
        *("site", ("rack:r1",)),
        *("netbox", ("rack:r2",)),
    )


def test_sources_that_agree_have_no_conflict() -> None:
    merged = merge_sources([("a", csv("node:n1,rack:r1")), ("b", csv("node:n1,rack:r1"))])
    assert merged.conflicts == []
    assert merged.sources == {("node:n1", "rack:r1"): "a"}


def test_a_circle_between_sources_refuses_the_later_line_and_keeps_all_others() -> None:
    merged = merge_sources(
        [("a", csv("rack:r1,cdu:c1")), ("b", csv("cdu:c1,row:1", "row:1,rack:r1", "node:n1,rack:r1"))]
    )
    assert list(merged.refused) == [("b", "row:1")]
    assert merged.parents == {"rack:r1": ("cdu:c1",), "cdu:c1": ("row:1",), "node:n1": ("rack:r1",)}
    [problem] = [p for p in check_sources({}, merged) if p.check == "circle"]
    assert "cdu:c1" in problem.text


def test_netbox_and_a_fabric_file_describe_one_cable_once() -> None:
    found = merge_sources([("netbox", read("netbox", json.dumps(NETBOX))), ("fabric", read("ibnetdiscover", IBNET))])
    assert [(link.a, link.b, source) for link, source in found.links] == [
        ("port:n1.eth0", "port:l1.Ethernet4", "netbox"),
        ("port:l1.1", "port:n1.mlx5_0", "fabric"),
        ("port:l1.35", "port:s1.32", "fabric"),
    ]


def problems_of(*lines: str) -> set[tuple[str, str, str]]:
    found = csv(*lines)
    return {(p.check, p.entity, p.hint) for p in check_sources({"s": found}, merge_sources([("s", found)]))}


def test_an_unknown_parent_is_reported_with_the_name_that_was_meant() -> None:
    found = problems_of("node:n1,rack:rack-12", "node:n2,rack:rcak-12", "rack:rack-12,row:a")
    assert ("unknown parent", "rack:rcak-12", "did you mean rack:rack-12?") in found


def test_a_name_with_another_number_is_not_what_was_meant() -> None:
    found = problems_of("node:n1,rack:rack-12", "node:n2,rack:rack-13", "rack:rack-12,row:a")
    assert ("unknown parent", "rack:rack-13", "add a line for rack:rack-13") in found


def test_lines_that_no_building_has_are_reported_with_their_place() -> None:
    found = csv(
        *("node:n1,rack:r1", "node:n1,rack:r2", "rack:r1,node:n3", "rack:r2,row:a"),
        *("node:n3,leaf:l1", "node:n3,leaf:l2", "rack:r2,pdu:a", "rack:r2,pdu:b"),
    )
    problems = [p for p in check_sources({"s": found}, merge_sources([("s", found)])) if p.check == "impossible"]
    assert {(p.entity, p.text, p.hint) for p in problems} == {
        ("node:n1", "line 2: is in rack:r1 and in rack:r2", "leave one rack"),
        ("rack:r1", "line 4: is inside node:n3: a rack is never inside a node", "swap entity and parent"),
    }


def test_a_misspelt_kind_is_reported_and_a_kind_of_the_site_is_not() -> None:
    found = problems_of("nod:n1,rack:r1", "node:n2,rcak:r1", "node:n3,cage:4", "rack:r1,datahall:2")
    assert {(check, entity, hint) for check, entity, hint in found if check == "unknown kind"} == {
        ("unknown kind", "nod:n1", "did you mean node?"),
        ("unknown kind", "rcak:r1", "did you mean rack?"),
    }


def test_names_that_differ_in_case_separators_or_zeros_are_near_misses() -> None:
    found = problems_of("node:gpu-01,rack:r1", "node:GPU_1,rack:r1", "node:gpu-11,rack:r1")
    assert {(check, entity) for check, entity, _ in found} == {("near miss", "node:GPU_1")}


def test_duplicates_and_links_with_one_end_are_reported() -> None:
    text = 'version = 1\n[[link]]\na = "port:n1.mlx5_0"\n'
    found = read("toml", text)
    assert [(p.check, p.entity) for p in check_sources({"s": found}, merge_sources([("s", found)]))] == [
        ("one end", "port:n1.mlx5_0")
    ]
    twice = dict(NETBOX, devices=NETBOX["devices"]["results"][:1] * 2)
    twice["devices"][1] = dict(twice["devices"][0], id=99, rack={"id": 2, "name": "r2"})
    found = read("netbox", json.dumps(twice))
    assert list(found.duplicates) == ["node:n1"]


def test_what_only_agents_or_only_sources_know_is_reported_and_gpus_without_a_rack() -> None:
    found = csv("node:n1,rack:r1", "node:n3.example.org,rack:r1", "node:gone,rack:r1")
    merged = merge_sources([("s", found)])
    reported = {"node": ["node:n1", "node:n2", "node:n3"], "gpu": ["gpu:n1.0", "gpu:n2.0"]}
    graph = ParentGraph({**merged.parents, "gpu:n1.0": ("node:n1",), "gpu:n2.0": ("node:n2",)})
    problems = {(p.check, p.entity, p.hint) for p in check_against_telemetry(merged, reported, graph)}
    assert problems == {
        ("not in sources", "node:n2", ""),
        ("not in sources", "node:n3", "did you mean node:n3.example.org (short_names = true)?"),
        ("not reported", "node:n3.example.org", "did you mean node:n3 (short_names = true)?"),
        ("not reported", "node:gone", ""),
        ("no rack", "gpu:n2.0", ""),
    }


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = fleetpulse.main(["topology", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_ends_with_0_1_or_2_and_its_lines_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, doubtful, bad = (tmp_path / name for name in ("topology.conf", "site.csv", "bad.toml"))
    good.write_text(CONF)
    long = "x" * 240
    doubtful.write_text(f"entity,parent\nnode:{long},rack:r1\nnode:{long[:-1]}X,rack:r1\n")
    bad.write_text("version = 1\n[node\n")
    code, out, err = run(capsys, "check", "--offline", str(good))
    assert (code, out) == (0, "")
    assert "5 node, 2 leaf, 1 spine" in err
    code, out, err = run(capsys, "check", "--offline", str(good), str(doubtful))
    assert code == 1
    assert "near miss" in out
    assert max(map(len, out.splitlines())) <= 120
    code, out, err = run(capsys, "check", "--offline", str(good), str(bad))
    assert code == 2
    assert "bad.toml" in err
    assert "expected" in err
    code, out, _ = run(capsys, "check", "--offline", "--output", "json", str(doubtful))
    assert json.loads(out)[0]["check"] == "near miss"


def test_another_systems_file_becomes_a_topology_toml_with_the_same_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "netbox.json"
    file.write_text(json.dumps(NETBOX))
    code, out, _ = run(capsys, "import", str(file))
    assert code == 0
    before, after = read("netbox", file.read_text()), read("toml", out)
    assert {e: p for e, p in after.parents.items() if p} == {e: p for e, p in before.parents.items() if p}
    assert after.attributes == before.attributes
    assert [(x.a, x.b) for x in after.links] == [(x.a, x.b) for x in before.links]


def test_kinds_of_a_source_can_be_renamed() -> None:
    found = read("slurm", "SwitchName=s1 Nodes=n1\n", Naming({"leaf": "rack"}))
    assert found.parents["node:n1"] == ("rack:s1",)
