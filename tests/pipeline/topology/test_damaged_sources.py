"""Damaged sources of topology: any damage gives a topology or a fault with its place, soon, and stops nothing else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.commands.topology import run_topology
from pipeline.config.sections import Config
from pipeline.model.errors import UsageError
from pipeline.model.names import find_text_fault
from pipeline.topology.check import check_sources
from pipeline.topology.merge import merge_sources
from pipeline.topology.source import Naming, SourceTopology
from tests.examples import examples
from tests.pipeline.topology.conftest import EXAMPLES, IBNET, Example, read

EACH = pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.format)
SLURM_YAML = "- topology: {}\n  tree:\n    switches:\n    - switch: s1\n      nodes: n1\n"
HUGE = "0x" + "f" * 5000  # Python reads it, and refuses to print it
FRAGMENTS = st.sampled_from(
    [
        *("!!int _", "!!bool x", "!!float _", "!!timestamp x", "!!binary x", "!!set {a}", "!", "0b_", "1:2:3.5", "~"),
        *("yes", ".inf", "2024-13-45", "<<", "=", "&a", "*a", "---", "...", "%YAML 9.9", "? [a]", "|", "\\ud800"),
        *(HUGE, "9" * 5000, "1:0" * 300, "1e999", "NaN", "[[[[", "{{{{", "\x1b[31m", "\u202e", "\x00", '"', "'", "\\"),
        *("S-00000000000000aa", "S-e09d7303007a4bd8", "H-2c5eab0300b87b40", "[1]", "[0-199999]", ",", "=", ":", "."),
        *("file", "place", "self", "parents", "1979-05-27T07:32:00Z", "a.b.c", "true", "null", "\n", "\r\n", "  "),
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | FRAGMENTS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FRAGMENTS | st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def read_or_explain(format_: str, text: str, naming: Naming | None) -> SourceTopology | str:
    """What a text gives, or why it is refused."""
    try:
        return read(format_, text, naming)
    except UsageError as error:
        return str(error)


def judge(format_: str, text: str, of: Example | None = None) -> None:
    """Asserts that a text gives what can be merged, checked and stored, or a fault as a fault has to be."""
    found = read_or_explain(format_, text, of.naming if of else None)
    if isinstance(found, str):
        assert re.fullmatch(r"site\.file: .+; expected .+", found), found
        assert find_text_fault([found]) is None
        assert len(found) < 1000
        return
    merged = merge_sources([("site", found)])
    check_sources({"site": found}, merged)
    stored = json.dumps([merged.attributes, [(link.a, link.b, dict(link.facts)) for link, _ in merged.links]])
    assert find_text_fault([stored], len(stored)) is None
    assert "\\u001b" not in stored


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck), deadline=5000)
@EACH
@given(data=st.data())
def test_any_change_of_characters_gives_a_topology_or_a_fault(example: Example, data: st.DataObject) -> None:
    text = example.text
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 30)))
        text = text[:start] + data.draw(FRAGMENTS | st.text(max_size=6)) + text[end:]
    judge(example.format, text, example)


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck), deadline=5000)
@EACH
@given(data=st.data())
def test_any_exchange_of_words_and_lines_gives_a_topology_or_a_fault(example: Example, data: st.DataObject) -> None:
    parts = re.findall(r"\w+|\W", example.text)
    for _ in range(data.draw(st.integers(1, 4))):
        to, of = (data.draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        parts[to] = data.draw(st.sampled_from([parts[of], ""]) | FRAGMENTS)
    judge(example.format, "".join(parts), example)


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck), deadline=5000)
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.text[0] in "{-"], ids=lambda e: e.format)
@given(data=st.data())
def test_any_value_anywhere_in_a_document_gives_a_topology_or_a_fault(example: Example, data: st.DataObject) -> None:
    is_yaml = example.format == "slurm_yaml"
    document = yaml.safe_load(example.text) if is_yaml else json.loads(example.text)
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(walk(document))
        at, key = places[data.draw(st.integers(0, len(places) - 1))]
        value = data.draw(VALUES)
        if isinstance(at, dict) and data.draw(st.booleans()):
            key = data.draw(FRAGMENTS)
        at[key] = value
    judge(example.format, yaml.safe_dump(document) if is_yaml else json.dumps(document), example)


def walk(part: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key) of all values inside."""
    for key, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
        yield part, key
        if isinstance(value, (dict, list)):
            yield from walk(value)


SWITCH = 'Switch 36 "S-0000000000000001"  # "SWa" enhanced port 0 lid 1 lmc 0\n'
HOST = 'Ca 1 "H-00000000000000aa"  # "n1 mlx5_0"\n[1](00000000000000ab) "S-0000000000000001"[1]  # lid 5\n'


@pytest.mark.parametrize(
    ("format_", "text", "fault"),
    [
        (
            "ibnetdiscover",
            SWITCH + '[1] "S-00000000000000aa"[2](00000000000000ab)  # "n1 mlx5_0" lid 5 4xHDR\n' + HOST,
            r"1 devices that ports name have no lines of their own, first S-00000000000000aa \(n1 mlx5_0\); expected",
        ),
        (
            "ibnetdiscover",
            IBNET.replace('"H-e09d7303007a4bd8"[1]', '"H-2c5eab0300c26280"[1]'),
            r"1 devices that ports name have no lines of their own, first H-2c5eab0300c26280 \(n1 mlx5_0\); expected",
        ),
        *(
            ("slurm_yaml", SLURM_YAML.format(tag), rf"line 1: a YAML tag \({tag.split()[0]}\); expected the value")
            for tag in ("!!int _", "!!bool x", "!!float _", "!!timestamp x", "!!binary x", "!!python/name:os.system x")
        ),
        ("slurm_yaml", SLURM_YAML.format("a\n  topology: b"), r"line 2: key 'topology' again; expected each key once"),
        ("slurm_yaml", "- ? [a]\n  : b\n", r"line 1: a key that is a list or an object; expected a text as key"),
        ("slurm", "SwitchName=a Switches=,\n", "line 1: switch 'a' with neither; expected nodes or switches"),
        ("slurm", "BlockSizes=2 Nodes=a\n", "line 1: key 'nodes'; expected blocksizes alone"),
        ("slurm", "SwitchName=, Nodes=a\n", "line 1: no name of a switch; expected SwitchName=NAME"),
        ("toml", f"version = {HUGE}\n", "version = a number of over 64 bits; expected version = 1"),
        ("toml", f"version = {'9' * 5000}\n", "is not TOML: a number has too many digits; expected a topology.toml"),
        ("toml", f'version = 1\n[node]\n"n1" = [{HUGE}]\n', r"\[node\] \"n1\": is a list with a int; expected a list"),
        (
            "toml",
            f'version = 1\n[attributes]\n"node:n1" = {{ u = {HUGE} }}\n',
            r"\[attributes\] \"node:n1\": u is or contains a number of over 64 bits; expected texts, numbers",
        ),
        (
            "toml",
            'version = 1\n[attributes]\n"node:n1" = { since = 1979-05-27 }\n',
            r"\[attributes\] \"node:n1\": since is or contains a value of type date; expected texts, numbers",
        ),
        ("csv", "entity,parent,a\x1bb\nnode:n1,rack:r1,x\n", r"line 2: 'a\\x1bb': character U\+001B"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place_and_what_was_found(format_: str, text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=rf"^site\.file: {fault}"):
        read(format_, text)


def test_names_of_attributes_may_be_any() -> None:
    found = read("csv", "entity,parent,file,place,self,parents\nnode:n1,rack:r1,a,b,c,d\n")
    assert found.attributes == {"node:n1": {"file": "a", "place": "b", "self": "c", "parents": "d"}}


def test_a_switch_of_topology_yaml_keeps_its_name_as_written() -> None:
    for name in ("007", "0x10", "1:30", "2026-11-30", "1e3", "'null'"):
        found = read("slurm_yaml", SLURM_YAML.format("a").replace("s1", name))
        assert f"leaf:{name.strip(chr(39))}" in found.parents
    with pytest.raises(UsageError, match="is missing or no text"):
        read("slurm_yaml", SLURM_YAML.format("a").replace("s1", "null"))


FAN = "".join(f"SwitchName=s{n}_[0-7] Switches=s{n + 1}_[0-7]\n" for n in range(11)) + "SwitchName=s11_[0-7] Nodes=n1\n"
"""12 levels of 8 switches, each over all of the next level: 8**11 paths."""


@pytest.mark.parametrize(
    ("format_", "text", "fault"),
    [
        ("slurm", FAN, ""),
        ("slurm", "SwitchName=a[0-99999] Switches=b[0-99999]\n", "line 1: 100000 switches of the same"),
        ("slurm", f"SwitchName=a Nodes=n[{','.join(['0-199999'] * 5000)}]\n", "line 1: host list: over 200,000 names"),
        ("slurm", "".join(f"SwitchName=a{i} Nodes=n[0-199999]\n" for i in range(500)), "line 6: over 1,000,000 names"),
        ("slurm", "".join(f"SwitchName=a{i} Switches=a{i + 1}\n" for i in range(5000)), "line 14: switch 'a13' below"),
        ("slurm", "".join(f"BlockName=a{i} Nodes=n[0-199999]\n" for i in range(500)), "line 6: over 1,000,000 names"),
        ("slurm_yaml", SLURM_YAML.format("1" + ":59" * 60_000), ""),
        ("slurm_yaml", "a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(40)), "line 2: a YAML alias"),
        ("toml", "version = 1\n" + ".".join("a" * 40_000) + " = 1\n", "line 2: a key of 40000 parts; expected at most"),
        ("toml", f"version = 1\n[{'.'.join('a' * 40_000)}]\n", "line 2: a key of 40000 parts; expected at most"),
        (
            "netbox",
            json.dumps([{"url": "/api/dcim/cables/1/", **{f"{s}_terminations": [{}] * 9000 for s in "ab"}}]),
            r"\[0\]: a cable with 9000 terminations at one end; expected at most 64",
        ),
    ],
    ids=lambda value: value[:12] if len(value) < 20 else "",
)
def test_a_small_file_with_much_work_ends_soon(format_: str, text: str, fault: str) -> None:
    began = time.process_time()
    if fault:
        with pytest.raises(UsageError, match=rf"^site\.file: {fault}"):
            read(format_, text)
    else:
        assert read(format_, text).parents
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kind.toml", 'version = 1\n["no\\u001b[31mde"]\nn1 = 5\n'),
        ("name.toml", 'version = 1\n[node]\n"n1\\u001b[31mX" = 5\n'),
        ("netbox.json", json.dumps({"a\x1b[31m\ud800": 5, "u": "/api/dcim/"})),
        ("lldp.json", json.dumps({"n\x1b[31m": {"lldp": 7}, "m\x1b[31m": 7})),
        ("a\x1b[31m.csv", "x\n"),
        ("conf\u202e.conf", "SwitchName=a\x1b Nodes=n1\n"),
    ],
)
def test_the_check_shows_no_control_character_of_a_file(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    said: list[str] = []
    assert run_topology(Config(), arguments(path), said.append) == 2
    assert "expected" in said[-1]
    assert find_text_fault(said) is None
    assert "\x1b" not in capsys.readouterr().out


def arguments(path: Path) -> Any:
    from argparse import Namespace

    return Namespace(verb="check", files=[str(path)], format=None, offline=True, output="table")
