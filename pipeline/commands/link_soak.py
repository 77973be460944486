"""The link soak: a diagnostic that puts load on all links of a node, judged by the counters of its ports and NVLinks.

A program of the site makes the load (`[acts.exec] diagnose-link-soak`); its exit code is not enough. A soak passes if
it ran for MIN_SOAK_S, every link that carried traffic in the day before did so again, and no link counted an error. A
link without error counters has passed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb

from pipeline.acts import ledger
from pipeline.acts.act import Act
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND
from pipeline.model.signals import CLASS_OF_KIND
from pipeline.model.topology import Topology, kind_of
from pipeline.store import schema

LEVEL = "link-soak"
"""The level of a diagnostic that is a link soak."""
MIN_SOAK_S = 300.0
"""Shortest soak (s). Chosen: a bit error rate of 1e-12 shows 120 errors on 400 Gbit/s in this time."""
DAY = 86_400 * SECOND
MARGIN = 300 * SECOND
"""How far before a time its first value may be (us). Chosen: several samples of a slow agent."""
ERRORS: Mapping[str, tuple[str, ...]] = {
    "nic": (
        *("symbol_errors", "link_recoveries", "link_downs", "integrity_errors", "port_rx_errors", "crc_errors"),
        *("icrc_errors", "carrier_downs", "phy_symbol_errors", "phy_crc_errors", "phy_link_downs"),
    ),
    "nvlink": (
        *("replay_errors", "recovery_errors", "crc_errors", "malformed_packets", "rx_errors", "integrity_errors"),
        *("recoveries", "effective_errors", "symbol_errors"),
    ),
}
"""Counters of which none may rise, by class of device."""
TRAFFIC: Mapping[str, tuple[str, ...]] = {
    "nic": ("tx_bytes", "rx_bytes"),
    "nvlink": ("tx_bytes", "rx_bytes", "tx_data", "rx_data"),
}


@dataclass(frozen=True, slots=True)
class Soak:
    """What the counters say. waits: the last values of the time have not arrived.   faults: why it did not pass."""

    waits: bool
    faults: tuple[str, ...]
    links: int

    @property
    def text(self) -> str:
        """The result in words."""
        return "; ".join(self.faults) or f"{self.links} links carried traffic, 0 errors"


def is_soak(act: Act) -> bool:
    """Returns whether an act is a link soak that really runs."""
    return act.verb == "diagnose" and act.params.get("level") == LEVEL and act.mode == "on"


def judge_soak(cursor: duckdb.DuckDBPyConnection, topology: Topology, act: Act) -> Soak:
    """Returns what the counters of all links of the act's nodes say about the time in which it was carried out."""
    times = {step.state: step.time for step in ledger.load_steps(cursor, act.id)}
    start, end = times.get("executing", act.updated), times.get("executed", act.updated)
    links = [e for target in act.targets for e in topology.descendants(target) if kind_of(e) in ("port", "nvlink")]
    faults, carried, waits = [], 0, False
    if end - start < MIN_SOAK_S * SECOND:
        faults.append(f"ran for {(end - start) / SECOND:.0f} s; expected at least {MIN_SOAK_S:.0f} s")
    for device_class in ERRORS:
        own = [e for e in links if CLASS_OF_KIND.get(kind_of(e)) == device_class]
        used = {e for e, row in _read_links(cursor, device_class, own, start - DAY, start).items() if row["bytes"] > 0}
        found = _read_links(cursor, device_class, own, start, end)
        waits |= any(row["last"] < end for row in _read_links(cursor, device_class, own, start, None).values())
        carried += sum(row["bytes"] > 0 for row in found.values())
        faults += [f"{entity_name(e)}: no traffic" for e in sorted(used) if not found.get(e, {}).get("bytes")]
        blind = {e for e, row in found.items() if row["bytes"]} - _find_counted(cursor, device_class, own, start, end)
        faults += [f"{entity_name(e)}: no error counter has values" for e in sorted(blind)]
        faults += [fault for e, row in sorted(found.items()) for fault in _list_errors(e, row)]
    if not carried and not faults:
        faults.append("no link carried traffic")
    return Soak(waits, tuple(faults), carried)


def _list_errors(entity: str, row: Mapping[str, float]) -> list[str]:
    rose = [(name, number) for name, number in row.items() if name not in ("bytes", "last") and number > 0]
    return [f"{entity_name(entity)}: {number:,.0f} {name.replace('_', ' ')}" for name, number in rose]


def _read_links(
    cursor: duckdb.DuckDBPyConnection, device_class: str, links: Sequence[str], start: int, end: int | None
) -> dict[str, dict[str, float]]:
    """Returns by link how much its error counters rose, `bytes` of traffic, and `last` (see `read_rises`)."""
    columns, traffic = (*ERRORS[device_class], *TRAFFIC[device_class]), TRAFFIC[device_class]
    found = read_rises(cursor, device_class, columns, links, start, end)
    for row in found.values():
        row["bytes"] = sum(row.pop(column, 0.0) for column in traffic)
    return found


def _find_counted(
    cursor: duckdb.DuckDBPyConnection, device_class: str, links: Sequence[str], start: int, end: int
) -> set[str]:
    """Returns the links of which at least one error counter has values."""
    types = schema.class_types(cursor, device_class) if links else {}
    have = [column for column in ERRORS[device_class] if column in types]
    if not have:
        return set()
    source = schema.select_class(cursor, device_class, ["time", "entity", *have], start, end + 1)
    known = " OR ".join(f'"{column}" IS NOT NULL' for column in have)
    rows = cursor.execute(
        f"""WITH c AS ({source}) SELECT DISTINCT entity FROM c WHERE list_contains($1::VARCHAR[], entity)
            AND time >= make_timestamptz($2::BIGINT) AND time <= make_timestamptz($3::BIGINT) AND ({known})""",
        [list(links), start, end],
    ).fetchall()
    return {str(entity) for (entity,) in rows}


def read_rises(
    cursor: duckdb.DuckDBPyConnection,
    device_class: str,
    columns: Sequence[str],
    entities: Sequence[str],
    start: int,
    end: int | None,
) -> dict[str, dict[str, float]]:
    """Returns by entity how much each counter rose, and `last`, the time of its newest row (us).

    A counter that was reset counts from 0 again. end: None: up to now. Columns that the store lacks are left out.
    """
    types = schema.class_types(cursor, device_class) if entities else {}
    have = [column for column in columns if column in types]
    if not have:
        return {}
    first = start - MARGIN
    source = schema.select_class(cursor, device_class, ["time", "entity", *have], first, end)
    rises = ", ".join(
        f'"{c}"::DOUBLE - lag("{c}"::DOUBLE) OVER (PARTITION BY entity ORDER BY time) AS "{c}"' for c in have
    )
    sums = [f'coalesce(sum("{c}") FILTER ("{c}" > 0), 0)' for c in have]
    before = "" if end is None else " AND time <= make_timestamptz($4::BIGINT)"
    rows = cursor.execute(
        f"""WITH c AS ({source}), r AS (SELECT time, entity, {rises} FROM c
              WHERE list_contains($1::VARCHAR[], entity) AND time >= make_timestamptz($2::BIGINT){before})
            SELECT entity, epoch_us(max(time)), {", ".join(sums)} FROM r WHERE time > make_timestamptz($3::BIGINT)
            GROUP BY entity""",
        [list(entities), first, start, *(() if end is None else (end,))],
    ).fetchall()
    return {
        entity: {**dict(zip(have, map(float, rises_), strict=True)), "last": float(last)}
        for entity, last, *rises_ in rows
    }
