"""Agents of different versions beside one pipeline: stored rows do not depend on the sender or its version."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agents.node.joining import join_batches
from pipeline.model.records import SECOND, Batch, Block, EventBatch, Origin
from pipeline.transport import wire
from tests.pipeline import wire_v1
from tests.pipeline.conftest import Site

T0 = 1_790_000_000 * SECOND
TICKS = 20
QUERY = "SELECT epoch_us(time) AS at, entity, power, temperature, memory_used, energy FROM gpu ORDER BY ALL"


def ticks_of(node: str) -> list[Batch]:
    """Returns the readings of 20 s, at intervals of 1, 5 and 10 s; the second GPU is lost for a while."""
    found = []
    for tick in range(TICKS):
        entities = tuple(f"gpu:{node}.{i}" for i in range(1 if 7 <= tick < 12 else 2))
        width = len(entities)
        columns = {"gpu.power": np.round(300 + np.arange(width) + tick / 8, 3).astype("f4").reshape(1, width)}
        if tick % 5 == 3:
            columns["gpu.temperature"] = np.full((1, width), np.nan if tick == 8 else 50 + tick, "f4")
        if tick % 10 == 3:
            columns["gpu.memory_used"] = np.full((1, width), 2.0**37 + tick * 2**21, "f8")
            columns["gpu.energy"] = np.full((1, width), 2**63 + tick, "u8")
        origin = Origin("local", node, b"b" * 16)
        found.append(Batch(origin, np.array([T0 + tick * SECOND]), (Block("gpu", entities, columns),)))
    return found


def send(site: Site, node: str, batches: Sequence[Batch], encode: Callable[[Batch], bytes]) -> None:
    spool = site.spool(node)
    for batch in batches:
        spool.append(encode(batch), wire.TELEMETRY_KIND, int(batch.times[-1]))
    spool.sync()


def send_old(site: Site, node: str, batches: Sequence[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(wire, "VERSION", 1)
        send(site, node, batches, wire_v1.encode)


def join(batches: Sequence[Batch], size: int) -> list[Batch]:
    return [join_batches(batches[first : first + size]) for first in range(0, len(batches), size)]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("size", [1, 5, 7, 20])
def test_joined_ticks_are_stored_as_messages_of_one_tick_of_an_old_agent(
    new_site: Callable[[], Site], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    old, new = new_site(), new_site()
    send_old(old, "n1", ticks_of("n1"), monkeypatch)
    send(new, "n1", join(ticks_of("n1"), size), wire.Encoder().encode)
    counters = old.drain().counters["samples"], new.drain().counters["samples"]
    assert counters[0] == counters[1]
    assert old.rows(QUERY) == new.rows(QUERY)
    assert len(new.rows(QUERY)) == 35
    assert new.rows("SELECT count(*) FROM (SELECT time, entity FROM gpu GROUP BY ALL HAVING count(*) > 1)") == [(0,)]
    for site in (old, new):
        site.shut()
        for spool in site.spools.values():
            spool.close()


def test_old_and_new_agents_and_one_that_was_upgraded_are_stored_side_by_side(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_old(site, "old", ticks_of("old"), monkeypatch)
    send(site, "new", join(ticks_of("new"), 5), wire.Encoder().encode)
    send_old(site, "upgraded", ticks_of("upgraded")[:9], monkeypatch)
    send(site, "upgraded", join(ticks_of("upgraded")[9:], 5), wire.Encoder().encode)
    site.drain()
    rows: dict[str, list[tuple[object, ...]]] = {}
    for time, entity, *values in site.rows(QUERY):
        node, _, number = str(entity).removeprefix("gpu:").rpartition(".")
        rows.setdefault(node, []).append((time, number, *values))
    assert rows["old"] == rows["new"] == rows["upgraded"]
    assert len(rows["old"]) == 35
    assert site.rows("SELECT count(*) FROM dead_letter") == [(0,)]
    assert site.rows("SELECT count(*) FROM gaps") == [(0,)]


def test_a_pipeline_of_version_1_reads_the_events_of_a_newer_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = EventBatch(Origin("local", "n1", bytes(16)), ())
    message = wire.seal(wire.encode_events(batch), wire.EVENTS_KIND, bytes(16), 1, 2)
    monkeypatch.setattr(wire, "VERSION", 1)
    assert wire.decode_events(message) == batch
