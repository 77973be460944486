"""What every source of topology keeps: good files give lines, broken ones an error that names the file, never half."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pipeline.model.errors import UsageError
from pipeline.model.names import find_entity_fault
from pipeline.model.topology import ParentGraph
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
