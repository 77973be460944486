"""The site's topology files in the running pipeline: read at the start, again when they change, kept with intervals.

Files are read in a thread of their own, so that a large one delays no evaluation; what it gives is applied by the
loop. After a start with a bad file its source keeps what the store has of it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb

from pipeline.config.topology import OWN, TopologyFiles
from pipeline.model.membership import Membership
from pipeline.model.topology import Parents
from pipeline.store.database import Database
from pipeline.store.topology_lines import load_site, write_site
from pipeline.topology.merge import MergedTopology
from pipeline.topology.site import SiteTopology, SourceSetting, read_source
from pipeline.topology.source import Naming, SourceTopology

log = logging.getLogger("fleetpulse.topology")
CHECK_SECONDS = 10.0
"""Time between two looks at the files (s). Chosen: a person who edits one waits that long; 20,000 files take 0.1 s."""
_SHOWN = 3  # lines that are named in the log


def list_settings(files: TopologyFiles) -> list[SourceSetting]:
    """The configured sources in order of precedence: [topology] path first."""
    own = [SourceSetting(OWN, "toml", files.path)] if files.path is not None else []
    return own + [
        SourceSetting(s.name or s.format, s.format, Path(s.path), Naming(s.kinds, s.labels, s.roles, s.short_names))
        for s in files.sources
    ]


class SiteReload:
    """Reads the sources and applies what changed. For the thread of the loop. merged: what counts now."""

    def __init__(
        self, files: TopologyFiles, database: Database, clock: Callable[[], int], monotonic: Callable[[], float]
    ) -> None:
        self._database, self._clock, self._monotonic = database, clock, monotonic
        self.site = SiteTopology(list_settings(files))
        self.merged = MergedTopology()
        self._thread: threading.Thread | None = None
        self._fresh: MergedTopology | None = None
        self._checked = monotonic()

    def start(self) -> None:
        """Reads all sources. Raises UsageError if [topology] path cannot be read and the store has nothing of it."""
        self.site.read_changed()
        for setting in self.site.settings:
            if setting.name not in self.site.good:
                with self._database.lock:
                    known = load_site(self._database.connection, setting.name)
                if known:
                    self.site.good[setting.name] = SourceTopology(known)
                    log.warning("topology source %s: what the store has of it counts", setting.name)
                elif setting.name == OWN:
                    read_source(setting)  # raises
        self._write(self.site.merge())

    def poll(self, membership: Membership) -> bool:
        """Applies files that changed; starts reading them every CHECK_SECONDS. Returns whether anything changed."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if (fresh := self._fresh) is not None:
                self._fresh = None
                self._apply(fresh, membership)
                return True
        if self._thread is None and self.site.settings and self._monotonic() - self._checked >= CHECK_SECONDS:
            self._checked = self._monotonic()
            if self.site.find_changed():
                self._thread = threading.Thread(target=self._read, name="topology files", daemon=True)
                self._thread.start()
        return False

    def _read(self) -> None:
        try:
            if self.site.read_changed():
                self._fresh = self.site.merge()
        except Exception:
            log.exception("topology files: reading failed; the last valid files count")

    def _apply(self, fresh: MergedTopology, membership: Membership) -> None:
        old = self.merged
        changed = {e for e in {**old.parents, **fresh.parents} if old.parents.get(e) != fresh.parents.get(e)}
        changed |= old.attributes.keys() | fresh.attributes.keys()
        with self._database.lock:
            reported, facts = _load_reported(self._database.connection, changed)
        self._write(fresh)
        bad = membership.change_site((fresh.parents, fresh.attributes), reported, facts)
        for entity, why in list(bad.items())[:_SHOWN]:
            log.warning("topology: line of %s not used with the inventory: %s", entity, why)

    def _write(self, fresh: MergedTopology) -> None:
        """Stores the lines with their intervals, and logs what changed."""
        links = [(link.a, link.b, source, link.facts) for link, source in fresh.links]
        with self._database.transaction() as connection:
            change = write_site(connection, fresh.sources, links, self._clock())
        self.merged = fresh
        if change.began or change.ended:
            log.warning("topology of the site: %d lines began, %d ended", change.began, change.ended)
        for conflict in fresh.conflicts[:_SHOWN]:
            log.warning(
                "topology: %s: %s says %s, %s says %s; the first counts (%d conflicts: fleetpulse topology check)",
                *(conflict.entity, conflict.by, ", ".join(conflict.used), conflict.other_by),
                *(", ".join(conflict.other), len(fresh.conflicts)),
            )

    def count(self) -> dict[str, float]:
        """Metrics by name with labels."""
        out = {
            "fleetpulse_topology_lines": float(len(self.merged.sources)),
            "fleetpulse_topology_conflicts": float(len(self.merged.conflicts)),
            "fleetpulse_topology_reloads_total": float(self.site.reloads),
        }
        for setting in self.site.settings:
            label = f'{{source="{setting.name}"}}'
            out[f"fleetpulse_topology_source_refused{label}"] = float(setting.name in self.site.faults)
            out[f"fleetpulse_topology_refusals_total{label}"] = float(self.site.refusals.get(setting.name, 0))
        return out


def _load_reported(
    connection: duckdb.DuckDBPyConnection, entities: set[str]
) -> tuple[Parents, dict[str, dict[str, object]]]:
    """What inventories say about entities: parents and attributes."""
    rows = connection.execute(
        "SELECT entity, parents, attributes FROM entity WHERE entity IN (SELECT unnest($1::VARCHAR[]))",
        [sorted(entities)],
    ).fetchall()
    parents = {entity: tuple(above) for entity, above, _ in rows if above}
    facts: dict[str, dict[str, object]] = {}
    for entity, _, text in rows:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):  # as at the start: such a row is skipped
            continue
        if isinstance(found, dict) and found:
            facts[entity] = found
    return parents, facts
