"""What every source of topology keeps: good files give lines, broken ones an error that names the file, never half."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pipeline.model.errors import UsageError
from pipeline.model.names import find_entity_fault
from pipeline.model.topology import ParentGraph
from pipeline.topology.check import check_sources
from pipeline.topology.merge import merge_sources
from pipeline.topology.site import READERS, SourceSetting, read_source
from pipeline.topology.source import SourceTopology
from tests.pipeline.topology.conftest import EXAMPLES, Example, read

EACH = pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.format)


def test_every_format_has_an_example() -> None:
    assert {example.format for example in EXAMPLES} == set(READERS)


@EACH
def test_a_good_file_gives_its_lines(example: Example) -> None:
    found = read(example.format, example.text, example.naming)
    assert {entity: found.parents.get(entity) for entity in example.lines} == dict(example.lines)


@EACH
def test_all_names_are_entities_and_parents_form_no_circle(example: Example) -> None:
    found = read(example.format, example.text, example.naming)
    names = [*found.parents, *(p for above in found.parents.values() for p in above), *found.attributes]
    assert find_entity_fault(names) is None
    assert ParentGraph().set_valid(found.parents) == {}
    assert all({link.a, link.b} <= found.parents.keys() for link in found.links)


@EACH
def test_reading_twice_gives_the_same(example: Example) -> None:
    assert read(example.format, example.text) == read(example.format, example.text)


@EACH
def test_a_truncated_file_is_read_as_far_as_it_is_whole_or_refused_with_its_name(example: Example) -> None:
    whole = read(example.format, example.text, example.naming)
    for end in range(1, len(example.text), max(1, len(example.text) // 60)):
        found = read_or_explain(example, example.text[:end])
        if isinstance(found, str):
            assert found.startswith("site.file")
        else:
            assert len(found.parents) <= len(whole.parents) + 1


def read_or_explain(example: Example, text: str) -> SourceTopology | str:
    """What a text gives, or why it is refused."""
    try:
        return read(example.format, text, example.naming)
    except UsageError as error:
        return str(error)


BROKEN: Mapping[str, Callable[[str], str]] = {
    "another format": lambda text: "{[(<" + text,
    "binary": lambda text: "\x00\x01\x02" * 50,
    "a list of numbers": lambda text: "[1, 2, 3]",
    "a number": lambda text: "7",
    "nested": lambda text: "[" * 100_000,
    "html": lambda text: "<!DOCTYPE html><html><body>502 Bad Gateway</body></html>\n",
}


@pytest.mark.sample(every=5)
@EACH
@pytest.mark.parametrize("how", BROKEN)
def test_a_wrong_file_is_refused_with_its_name_and_what_was_expected(example: Example, how: str) -> None:
    with pytest.raises(UsageError, match=r"site\.file") as caught:
        read(example.format, BROKEN[how](example.text))
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 1000


@EACH
def test_damage_anywhere_never_raises_anything_else(example: Example) -> None:
    randomness = random.Random(7)
    for _ in range(60):
        text = list(example.text)
        for _ in range(randomness.randint(1, 4)):
            place = randomness.randrange(len(text))
            text[place] = randomness.choice(["", "\u202e", "\n", '"', "{", "]", "0", "=", "\x00", "n" * 300, "é"])
        found = read_or_explain(example, "".join(text))
        assert not isinstance(found, str) or "site.file" in found


@EACH
def test_names_of_253_characters_are_names_and_longer_ones_are_refused(example: Example) -> None:
    long = "x" * 200 + ".example." + "y" * 30
    assert long in "".join(read(example.format, example.text.replace("n1", long)).parents)
    with pytest.raises(UsageError, match="characters"):
        read(example.format, example.text.replace("n1", "z" * 400))


@EACH
def test_a_hundred_thousand_brackets_or_quotes_end_soon(example: Example) -> None:
    began = time.process_time()
    for text in ("[" * 100_000, '"' * 100_000, "a[0-" * 30_000, "x,y\n" * 30_000, "- [" * 30_000):
        with pytest.raises(UsageError):
            read(example.format, text)
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("toml", "version = 1\n"),
        ("csv", "entity,parent\n"),
        ("netbox", '{"count": 0, "next": null, "results": []}'),
        ("kubernetes", '{"kind": "List", "items": []}'),
        ("slurm", "# nothing\n"),
    ],
)
def test_an_export_without_any_device_is_refused_as_of_a_token_without_rights(
    format_: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "export").write_text(text)
    with pytest.raises(UsageError, match="names no device; expected at least one"):
        read_source(SourceSetting("site", format_, tmp_path / "export"))


def test_a_list_of_the_kubernetes_api_that_is_not_of_nodes_is_refused() -> None:
    row = '{"metadata": {"name": "web-0", "labels": {}}}'
    assert list(read("kubernetes", f'{{"kind": "NodeList", "items": [{row}]}}').parents) == ["node:web-0"]
    with pytest.raises(UsageError, match=r"site.file: kind: 'PodList'; expected List or NodeList"):
        read("kubernetes", f'{{"kind": "PodList", "items": [{row}]}}')


def page(**marks: object) -> str:
    """A part of 500 devices, as NetBox answers with limit=1."""
    return json.dumps({"count": 500, "next": None, "previous": None, "results": [NETBOX_DEVICE], **marks})


NETBOX_DEVICE = {"url": "https://nb/api/dcim/devices/1/", "id": 1, "name": "n001", "role": {"slug": "gpu-node"}}
NEXT = "https://nb/api/dcim/devices/?limit=1&offset=1"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (page(next=NEXT), "next"),
        (page(previous=NEXT), "previous"),
        (f'{{"racks": [], "devices": {page(next=NEXT)}}}', "devices.next"),
        (f'{{"devices": {page(previous=NEXT)}}}', "devices.previous"),
    ],
)
def test_a_page_of_netbox_is_refused_wherever_it_is(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=rf"^site\.file: {place}: names .* page, .*; expected all rows: .*jq -s"):
        read("netbox", text)
    assert list(read("netbox", text.replace(json.dumps(NEXT), "null")).parents) == ["node:n001"]


def test_a_page_of_kubernetes_is_refused_with_how_many_nodes_are_missing() -> None:
    items = [{"metadata": {"name": "n001", "labels": {}}}]
    marks = {"resourceVersion": "1", "continue": "eyJ2IjoibWV0YS5r", "remainingItemCount": 11500}
    with pytest.raises(
        UsageError, match=r"site\.file: metadata\.continue: is set, so that 11500 nodes are missing here"
    ):
        read("kubernetes", json.dumps({"kind": "NodeList", "metadata": marks, "items": items}))
    for whole in ({"resourceVersion": "1", "continue": ""}, {"resourceVersion": "1"}, None):
        text = json.dumps({"kind": "NodeList", "metadata": whole, "items": items})
        assert list(read("kubernetes", text).parents) == ["node:n001"]


def test_an_output_of_ibnetdiscover_that_was_cut_after_any_of_its_lines_is_refused() -> None:
    (example,) = [one for one in EXAMPLES if one.format == "ibnetdiscover"]
    lines = example.text.splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.startswith("Ca"))
    for end in range(1, last + 1):
        with pytest.raises(
            UsageError, match=r"^site\.file: (no port of a switch|[1-4] devices that ports name have no)"
        ):
            read("ibnetdiscover", "".join(lines[:end]))
    assert (
        read("ibnetdiscover", "".join(lines[: last + 1])).parents.keys()
        == read("ibnetdiscover", example.text).parents.keys()
    )


BRIDGE_OFF, STATION_ON, STATION_OFF = (
    {"type": kind, "enabled": is_on} for kind, is_on in (("Bridge", False), ("Station", True), ("Station", False))
)


@pytest.mark.parametrize(
    ("capability", "is_leaf"),
    [
        (None, True),
        ([], True),
        ([{"type": "Bridge", "enabled": True}, STATION_OFF], True),
        ({"type": "Router", "enabled": True}, True),  # of one, lldpcli's json writes no list
        ([{"type": "Bridge", "enabled": True}, STATION_ON], True),
        ([BRIDGE_OFF, STATION_OFF], True),
        ([BRIDGE_OFF, STATION_ON], False),
        (STATION_ON, False),
        (STATION_OFF, False),
        ([{"type": "Tel", "enabled": True}], False),
    ],
)
def test_a_neighbor_that_is_neither_bridge_nor_router_is_no_leaf(capability: object, is_leaf: bool) -> None:
    port = {"id": {"type": "ifname", "value": "eth0"}}
    said = {} if capability is None else {"capability": capability}
    by_name = {"via": "LLDP", "chassis": {"far": {"id": {"type": "mac", "value": "52:54:00:00:00:01"}, **said}}}
    listed = {"name": "eth1", "chassis": [{"id": [{"type": "mac", "value": "x"}], "name": [{"value": "far"}], **said}]}
    entries = [{"eth1": {**by_name, "port": port}}, {**listed, "port": [port]}]
    for entry in entries:
        found = read("lldp", json.dumps({"n1": {"lldp": {"interface": [entry]}}}))
        assert ("leaf:far" in found.parents, len(found.links)) == (is_leaf, int(is_leaf))
        assert found.remarks == ([] if is_leaf else ["n1 eth1: neighbor 'far' left out: neither bridge nor router"])


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("csv", "entity,parent\nnode:n1,rack:r12\n"),
        ("slurm", "SwitchName=l1 Nodes=n1,n12\n"),
        ("slurm_yaml", "- topology: a\n  tree:\n    switches:\n      - switch: l1\n        nodes: n1,n12\n"),
    ],
)
def test_a_text_that_was_cut_within_its_last_line_is_in_doubt(format_: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "site"
    setting = SourceSetting("site", format_, path)
    for given, doubts in ((text, []), (text[:-2], [f"{path}: its last line has no line break"])):
        path.write_text(given)
        found = read_source(setting)
        assert found.doubts == doubts
        problems = check_sources({"site": found}, merge_sources([("site", found)]))
        assert [(p.level, p.text) for p in problems if p.check == "cut"] == [("warning", text) for text in doubts]
