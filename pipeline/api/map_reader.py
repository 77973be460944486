"""What one request of the fleet page reads: from memory where it is kept, else from the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import duckdb
import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from pipeline.acts.ledger import list_held_at
from pipeline.api.fleet import (
    Row,
    find_affected_nodes,
    find_node,
    find_senders,
    list_nodes,
    list_unresolved,
    list_unresolved_at,
)
from pipeline.api.fleet_groups import By, FleetGroups, FleetIndex, Layout, Senders
from pipeline.api.fleet_map import (
    SCALES,
    Colour,
    ColourScale,
    NodePlaces,
    NodeRoles,
    count_states,
    deviations,
    encode_bytes,
    find_looks,
    find_roles,
    fit_power,
    quantize,
    reduce_by_node,
)
from pipeline.api.heatmap import RECENT, read_range, select_current
from pipeline.api.history import Span
from pipeline.api.map_before import find_new, find_reporting
from pipeline.api.service import ApiContext
from pipeline.api.share import NodeAttributes, list_attributes, make_attributes
from pipeline.model.errors import OverLimit, Retryable
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

T = TypeVar("T")
NODES_FOR = 10 * SECOND
"""How long the list of nodes is kept (us). Chosen: as often as the newest rows are written."""
RATES_FOR = 30 * SECOND
"""How long rates of link errors are kept (us). Chosen: a tenth of the time over which they are read."""
MINUTE = 60 * SECOND
BEFORE = 60 * MINUTE
"""Age of the state that the counts are compared with (us). Chosen: what changed in the last hour."""
OF_INCIDENTS = ("critical", "degraded", "watch", "affected")
"""States of nodes that incidents give."""
CHANGED_WITHIN = 24 * 3600 * SECOND
"""Age of a change of versions that counts as recent (us). Chosen: a rollout takes a day."""
CHANGES_FOR = 60 * SECOND
"""How long the list of recent changes is kept (us). Chosen."""
MAX_AGE = 60 * SECOND
"""Age from which a value is not shown as current (us): as in GET /api/v1/heatmap."""


class MapReader:
    """What one request reads, from memory where it is kept."""

    def __init__(self, service: ApiContext, topology: Topology, now: int) -> None:
        self._service, self.topology, self._now = service, topology, now
        self._groups: FleetGroups = service.groups
        self.places: NodePlaces = service.places
        backend = service.backend
        known = (topology, backend.read_revision(), len(backend.devices.names("node")), now // NODES_FOR)
        self.index: FleetIndex = self._groups.index(
            service.remember("map nodes", known, lambda: self._read(list_nodes))
        )
        self.senders: Senders = lambda: self._groups.keep(
            ("senders",), (backend.devices, len(backend.devices.names("rank"))), self._list_senders
        )

    def layout(self, by: By, within: str | None) -> Layout:
        """Returns the cells of the nodes grouped by `by`; within: only nodes of this entity."""
        return self._groups.layout(self.index, self.topology, self.senders, by, within)

    def roles(self) -> tuple[Sequence[Row], NodeRoles]:
        """Returns the unresolved incidents, and which nodes hold their causes or are affected."""

        def find(cursor: duckdb.DuckDBPyConnection) -> tuple[Sequence[Row], NodeRoles]:
            incidents = list_unresolved(cursor)
            return incidents, find_roles(incidents, self.topology, find_senders(cursor, incidents))

        state = (self.topology, self._service.backend.read_revision())
        return self._service.remember("map roles", state, lambda: self._read(find))

    def counts_before(self, layout: Layout) -> dict[str, Any]:
        """Returns the time BEFORE this one, to the minute, and the counts of then, of the nodes of now that were there.

        Without `no_data` if no node has a stored row of then: nothing was stored, or its time is over.
        """
        moment = self._now // MINUTE * MINUTE - BEFORE

        def find(cursor: duckdb.DuckDBPyConnection) -> tuple[NodeRoles, set[str]]:
            incidents = list_unresolved_at(cursor, moment)
            roles = find_roles(incidents, self.topology, find_senders(cursor, incidents))
            return roles, list_held_at(cursor, moment)

        roles, held = self._service.remember("map roles before", (self.topology, moment), lambda: self._read(find))
        known = self._service.remember("map data before", (self.index, moment), lambda: self._reporting(moment))
        reporting, new = known
        seen = np.where(reporting | (not reporting.any()), moment, -1)
        counts = count_states(find_looks(self.index, roles, seen, held, moment)[layout.own & ~new])
        names = (*OF_INCIDENTS, "drained", *(("no_data",) if reporting.any() else ()))
        return {"time": iso(moment), "counts": {name: counts[name] for name in names}}

    def _reporting(self, moment: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns which nodes had data at a time, and which are new since then; none if the store is too busy to say,
        so that the map is not late."""
        known = self._service.backend.devices, self.places, self.index

        def find(cursor: duckdb.DuckDBPyConnection) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
            reporting = find_reporting(cursor, *known, moment)
            return reporting, find_new(cursor, *known, reporting, moment) if reporting.any() else reporting

        try:
            return self._service.reads.run(find)
        except (OverLimit, Retryable):
            return np.zeros(len(self.index.nodes), bool), np.zeros(len(self.index.nodes), bool)

    def reached(self, incident: str) -> NDArray[np.bool_]:
        """Returns which nodes an incident reaches. Raises 404 if there is no such incident."""

        def find(cursor: duckdb.DuckDBPyConnection) -> list[str]:
            query = "SELECT id, severity, cause, members FROM incidents WHERE id = ?"
            rows = cursor.execute(query, [incident]).fetchall()
            if not rows:
                raise HTTPException(404, f"incident {incident!r}: not found")
            found = find_affected_nodes(rows, self.topology, find_senders(cursor, rows))
            return [node for nodes in found for node in nodes]

        own = np.zeros(len(self.index.nodes), bool)
        for node in self._read(find):
            if (i := self.index.number.get(node)) is not None:
                own[i] = True
        return own

    def levels(self, colour: Colour, layout: Layout) -> tuple[str | None, dict[str, Any] | None, int]:
        """Returns levels of the cells, their scale, and the number of nodes without a value."""
        if colour == "state":
            return None, None, 0
        values = {
            "temperature": self._temperatures,
            "power": lambda: self._current("gpu.power", "mean"),
            "ber": self._error_rates,
            "step": self._slowness,
        }[colour]()
        scale: ColourScale = fit_power(values) if colour == "power" else SCALES[colour]
        levels = quantize(values, scale)[layout.nodes]
        return encode_bytes(levels), asdict(scale), int(np.isnan(values[layout.own]).sum())

    def attributes(self) -> Sequence[NodeAttributes]:
        """Returns places, versions and jobs of all nodes, and their recent changes."""
        source, senders = self._service.backend.topology, self.senders()
        kept = self._groups.keep(
            ("attributes",),
            (self.index, self.topology, source.version),
            lambda: list_attributes(self.index, self.topology, source.attributes, senders),
        )
        changes = self._groups.keep(
            ("changes",), (self.index, self._now // CHANGES_FOR), lambda: self._read(self._list_changes)
        )
        return kept, changes

    # --- values of nodes ----------------------------------------------------------------------------------------------

    def _current(self, name: str, how: str) -> NDArray[np.float64]:
        signal, devices = CATALOGUE[name], self._service.backend.devices
        found = select_current(
            self._service.backend.read_current(signal.device_class, [signal.column]),
            devices,
            signal,
            self._now,
            MAX_AGE,
        )
        place = self.places.find(devices, signal.device_class, self.index)
        return reduce_by_node(found.values.astype(np.float64), found.known, place, len(self.index.nodes), how)

    def _deviation(self, name: str, relative: bool) -> NDArray[np.float64]:
        signal, devices = CATALOGUE[name], self._service.backend.devices
        current = self._service.backend.read_current(signal.device_class, [signal.column])
        found = select_current(current, devices, signal, self._now, MAX_AGE)
        groups = self._service.names.groups(devices, self.topology, signal.device_class, "auto")
        distance = deviations(found, groups, relative)
        place = self.places.find(devices, signal.device_class, self.index)
        return reduce_by_node(distance, np.isfinite(distance), place, len(self.index.nodes), "max")

    def _temperatures(self) -> NDArray[np.float64]:
        return self._deviation("gpu.temperature", relative=False)

    def _slowness(self) -> NDArray[np.float64]:
        """Computation of the slowest rank where it is known, else its whole step, which all ranks wait for."""
        computed, whole = (self._deviation(name, relative=True) for name in ("rank.compute_time", "rank.step_time"))
        return np.where(np.isnan(computed), whole, computed)

    def _error_rates(self) -> NDArray[np.float64]:
        """Symbol errors per transmitted bit of the worst NIC, or the raw bit error rate of the worst NVLink."""
        return self._service.remember("map ber", (self.index, self._now // RATES_FOR), self._read_error_rates)

    def _read_error_rates(self) -> NDArray[np.float64]:
        devices, signal = self._service.backend.devices, CATALOGUE["nic.symbol_errors"]
        span = Span(self._now - RECENT, self._now, 1)
        errors = self._service.reads.run(lambda cursor: read_range(cursor, devices, signal, span))
        speed_signal = CATALOGUE["nic.speed"]
        current = self._service.backend.read_current("nic", [speed_signal.column])
        speed = select_current(current, devices, speed_signal, self._now, MAX_AGE)
        size = min(len(errors.values), len(speed.values))
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = errors.values[:size] / (speed.values[:size].astype(np.float64) * 1e6)
        known = errors.known[:size] & speed.known[:size] & (speed.values[:size] > 0)
        number = len(self.index.nodes)
        nics = reduce_by_node(rate, known, self.places.find(devices, "nic", self.index), number, "max")
        return np.fmax(nics, self._current("nvlink.raw_ber", "max"))

    # --- the store ----------------------------------------------------------------------------------------------------

    def _read(self, what: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        with self._service.cursor() as cursor:
            return what(cursor)

    def _list_senders(self) -> dict[str, str]:
        devices = self._service.backend.devices
        names = list(devices.names("rank"))
        return {name: f"node:{origin[1]}" for name, origin in zip(names, devices.origins("rank"), strict=False)}

    def _list_changes(self, cursor: duckdb.DuckDBPyConnection) -> NodeAttributes:
        """Returns versions that changed within a day: `driver 550 -> 560`."""
        rows = cursor.execute(
            "SELECT entity, data FROM events WHERE kind = 'version' AND time >= make_timestamptz(?)",
            [self._now - CHANGED_WITHIN],
        ).fetchall()
        pairs: dict[tuple[int, tuple[str, str]], None] = {}
        for entity, text in rows:
            node = find_node(self.topology, entity)
            number = self.index.number.get(node) if node else None
            if number is None:
                continue
            data = json.loads(text)
            for name, version in (data.get("versions") or {}).items():
                before = (data.get("before") or {}).get(name)
                pairs[number, ("change in 24 h", f"{name}: {before or 'none'} → {version or 'removed'}")] = None
        return make_attributes(pairs)
