"""Display names of entities, and titles that fit on a pager."""

from __future__ import annotations

import pytest

from pipeline.model.entity_names import (
    TITLE_LENGTH,
    add_to_title,
    entity_name,
    pager_title,
    short_duration,
    short_number,
)


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
