"""Display names of entities, and titles that fit on a pager."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.model.entity_names import (
    KINDS,
    TITLE_LENGTH,
    add_to_title,
    entity_name,
    pager_title,
    parse_entity_name,
    short_duration,
    short_number,
    split_part,
)
from pipeline.model.signals import CLASS_OF_KIND


@pytest.mark.parametrize(
    ("entity", "name"),
    [
        ("gpu:n042.3", "GPU 3 of n042"),
        ("port:n042.mlx5_0", "port mlx5_0 of n042"),
        ("rank:81.17", "rank 17 of job 81"),
        ("fabric:all", "whole fabric"),
        ("loop:l1", "loop l1"),
        ("facility:all", "whole facility"),
        ("widget:w1", "widget:w1"),
    ],
)
def test_an_entity_name_has_kind_part_and_owner(entity: str, name: str) -> None:
    """A kind without a display name is shown as it is written."""
    assert entity_name(entity) == name


def test_a_title_begins_with_the_entity_and_has_at_most_80_characters() -> None:
    """A long text is truncated with an ellipsis."""
    assert pager_title("leaf:l7", "3 of 8 ports down") == "Leaf switch l7: 3 of 8 ports down"
    assert pager_title("widget:w1", "broken") == "widget:w1: broken"
    long = pager_title("gpu:n042.3", "x" * 100)
    assert (len(long), long[-1]) == (80, "…")


def test_a_long_title_is_cut_after_a_word() -> None:
    cut = pager_title("gpu:n042.3", "XID 79 fell off the bus, not responding to its driver, also struck GPU 4")
    assert cut == "GPU 3 of n042: XID 79 fell off the bus, not responding to its driver, also…"
    assert pager_title("gpu:n042.3", "one " + "x" * 100).endswith("xxx…")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.34, "0.3"),
        (3, "3"),
        (9.97, "10"),
        (850.4, "850"),
        (1000, "1k"),
        (11_234, "11k"),
        (2_400_000, "2.4M"),
    ],
)
def test_a_number_in_a_title_is_rounded(value: float, text: str) -> None:
    """Two significant digits are enough beyond 1,000."""
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (45, "45 s"), (120, "2 min"), (7_200, "2 h"), (172_800, "2 d")]
)
def test_a_duration_has_one_unit(seconds: float, text: str) -> None:
    """The unit is the largest of which there are two at least."""
    assert short_duration(seconds) == text


JOB = "job 4711 hangs (64 GPUs)"
SLOW = "GPU 7 of n010: thermal throttle, rank 79 is 31 % slow"


@pytest.mark.parametrize(
    ("title", "affected", "shown"),
    [
        ("Port mlx5_2 of n034: 1 flap", JOB, f"Port mlx5_2 of n034: 1 flap; {JOB}"),
        ("x" * 60, JOB, f"{'x' * 60}; job 4711 hangs"),
        ("x" * 70, JOB, "x" * 70),
        (SLOW, "job 81 slower", SLOW),
        ("CDU c2: flow 193 L/min", "", "CDU c2: flow 193 L/min"),
        ("Leaf switch l1: 9 links down", f"job {'<b>' * 84} on it", "Leaf switch l1: 9 links down"),
    ],
)
def test_a_title_says_who_is_affected_if_it_fits_and_does_not_say_so_itself(
    title: str, affected: str, shown: str
) -> None:
    assert add_to_title(title, affected) == shown
    assert len(shown) <= TITLE_LENGTH


NAME = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=24)
"""Names of entities: dots, `=`, ` of ` and capital letters are common in them."""
NAMES = st.one_of(
    NAME,
    st.sampled_from(["all", "ALL", "N042.3", "a.b.c", "x of y.3", "y.3 of x", "driver=550.1=b", "81.17", "3 of job 8"]),
    st.builds("{}.{}".format, NAME, NAME),
    st.lists(st.sampled_from([".", " of ", " of job ", "=", " ", "a", "B", "7"]), min_size=1, max_size=9).map("".join),
)


@given(kind=st.sampled_from(sorted({*KINDS, *CLASS_OF_KIND, "widget"})), name=NAMES)
def test_a_name_leads_back_to_its_entity_in_any_case(kind: str, name: str) -> None:
    """Of every kind that has a name and of every kind of the catalogue."""
    entity = f"{kind}:{name}"
    shown = entity_name(entity)
    for text in (shown, shown[:1].upper() + shown[1:], "".join(c.swapcase() if c.isascii() else c for c in shown)):
        assert entity.casefold() in parse_entity_name(text), text


@pytest.mark.parametrize("text", ["", ":", "of", "gpu ", "whole", "whole moon", "rank 3 of n1"])
def test_other_texts_are_names_of_no_device_and_part(text: str) -> None:
    assert all("." not in entity for entity in parse_entity_name(text))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("GPU 3 of N0", ("gpu", "3", "n0")),
        ("leaf switch l", ("leaf", "", "l")),
        ("rank 17 of job 8", ("rank", "17", "8")),
        ("n042", ("", "", "n042")),
    ],
)
def test_the_beginning_of_a_name_has_kind_part_and_owner(text: str, parts: tuple[str, str, str]) -> None:
    assert split_part(text) == parts


def test_the_readings_of_a_hostile_name_are_bounded() -> None:
    """300 characters are the longest search."""
    for text in ("gpu" + " of " * 74, "version" + " a" * 146, "rank" + " of job " * 37):
        assert len(parse_entity_name(text)) <= 150
