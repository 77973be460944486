"""Silences: matchers over the labels of an incident, from a time until another. Semantics and names of Alertmanager.

Three kinds are one record: a `silence` sends no alerts; a `maintenance` window likewise, and until MAINTENANCE_GRACE
after its end, when what still holds is reported; a `mute` also keeps findings from opening incidents
(pipeline.judging.mutes). A silence ends; it is never deleted before the store's retention.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import duckdb

from pipeline.config.sections import ANY
from pipeline.incidents.matchers import Labels, Matcher, are_equal, make_list, read_matcher
from pipeline.judging.mutes import MAX_MUTE_US, Mute
from pipeline.model.errors import UsageError
from pipeline.model.places import list_place
from pipeline.model.records import SECOND, Incident, iso
from pipeline.model.topology import WORK, Topology, kind_of

SEVERITY = {"page": "critical", "ticket": "warning", "watch": "info"}
ALERT_NAMES = {
    "coolant": "CoolantFault",
    "generic": "Anomaly",
    "link": "LinkDegraded",
    "memory": "MemoryFault",
    "power": "PowerFault",
    "sdc": "SilentDataCorruption",
    "straggler": "Straggler",
    "telemetry": "TelemetryGap",
    "thermal": "ThermalFault",
}
MAINTENANCE_GRACE = 900 * SECOND
"""After the end of a maintenance window, findings that persist are judged: devices take minutes to settle. Chosen."""
FARTHEST = 3653 * 86_400 * SECOND
"""Latest start from now: ten years. Chosen: a later one is a typing error, and a sum with its end may be no
date."""
MAX_SILENCES = 1000
"""Most silences that have not ended; each is compared with every incident that changes. Chosen."""
STORM_OF, STORM_RECEIVERS = "storm_of", "receivers"
"""Labels of a storm: the `alertname` of its pages, and the receivers to which routes lead them."""
SCOPE = "scope"
"""Label with every entity of which all members of the incident are a part, as kind:name; it has many values."""
SLURM = "slurm:"
"""Begin of the source of a window that follows a reservation of Slurm; the reservation's name is after it."""
Kind = Literal["silence", "mute", "maintenance"]


def alert_name(detector: str) -> str:
    """Returns the label `alertname` of a detector's alerts: its family's, else its name in CamelCase."""
    family = detector.split("_", 1)[0]
    return ALERT_NAMES.get(family) or "".join(word.capitalize() for word in detector.split("_"))


def collect_labels(incident: Incident, topology: Topology, site: str) -> dict[str, tuple[str, ...]]:
    """Returns the labels of an incident for matchers: those of its alert, and what all its members are part of.

    A kind such as `rack` or `node` is a label, with the name in it, if all members are in one; `scope` has all of them,
    and the site of the pipeline, of which all that it monitors is a part. Jobs, stages and ranks among other members
    are what suffers: where they run does not count.
    """
    labels: dict[str, tuple[str, ...]] = {
        "alertname": (alert_name(incident.detector),),
        "severity": (SEVERITY[incident.severity],),
        "entity": (incident.entity,),
        "cause": (incident.cause,),
        "detector": (incident.detector,),
        "incident": (incident.id,),
        "site": (site,),
    }
    if incident.simulated:
        labels["simulated"] = ("true",)
    if incident.life.storm:
        labels[STORM_OF] = incident.life.storm[:1]
    shared: dict[str, None] | None = None
    members = incident.members or (incident.cause,)
    devices = [member for member in members if kind_of(member) not in WORK]
    for member in devices or members:
        chain = dict.fromkeys(list_place(member, topology))
        shared = chain if shared is None else {e: None for e in shared if e in chain}
        if not shared:
            break
    found = tuple(shared or ())
    for entity in found:
        kind = kind_of(entity)
        if kind not in labels:
            labels[kind] = tuple(e.partition(":")[2] for e in found if kind_of(e) == kind)
    return {**labels, SCOPE: tuple(dict.fromkeys((*found, f"site:{site}")))}


@dataclass(frozen=True, slots=True)
class Silence:
    """One silence. ends: as planned; expired: when a person ended it earlier. source: cli, api, or slurm:NAME."""

    id: str
    kind: Kind
    matchers: tuple[Matcher, ...]
    starts: int
    ends: int
    author: str
    reason: str
    created: int
    updated: int
    updated_by: str
    version: int = 1
    expired: int | None = None
    expired_by: str | None = None
    source: str = "api"

    @property
    def end(self) -> int:
        """When it no longer holds back alerts; of one that was ended before its start, when that was."""
        end = self.ends if self.expired is None else min(self.ends, self.expired)
        return end + MAINTENANCE_GRACE if self.kind == "maintenance" and end > self.starts else end

    def state(self, now: int) -> Literal["pending", "active", "expired"]:
        """Returns Alertmanager's word for where `now` is."""
        return "expired" if self.end <= now else "active" if self.starts <= now else "pending"

    def matches(self, labels: Labels) -> bool:
        """Returns whether all matchers match."""
        return all(m.matches(labels) for m in self.matchers)

    def as_json(self, now: int) -> dict[str, Any]:
        """Returns the silence in the form of the API."""
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self.state(now),
            "matchers": [m.as_json() for m in self.matchers],
            "text": " ".join(m.shorten() for m in self.matchers),
            "starts": iso(self.starts),
            "ends": iso(self.ends),
            "until": iso(self.end),
            "author": self.author,
            "reason": self.reason,
            "created": iso(self.created),
            "updated": iso(self.updated),
            "updated_by": self.updated_by,
            "version": self.version,
            "expired": None if self.expired is None else iso(self.expired),
            "expired_by": self.expired_by,
            "source": self.source,
        }

    def as_facts(self, now: int) -> dict[str, Any]:
        """Returns the silence for the audit: as `as_json`, with long values of matchers shortened."""
        return {**self.as_json(now), "matchers": [m.as_facts() for m in self.matchers]}


def check_silence(silence: Silence, now: int, longest: int = MAX_MUTE_US) -> Silence:
    """Returns the silence. Raises UsageError if it ends before it starts or now, is too long, or has no reason."""
    if not silence.reason.strip():
        raise UsageError("reason: is empty; expected the reason, for the next person on call")
    if silence.starts > now + FARTHEST:
        raise UsageError(f"starts = {iso(silence.starts)}: expected a time within ten years from now")
    if silence.ends <= max(now, silence.starts):
        raise UsageError(f"ends = {iso(silence.ends)}: expected a time after now and after starts")
    if silence.ends - max(silence.starts, now) > longest:
        days = longest // (86_400 * SECOND)
        raise UsageError(f"ends = {iso(silence.ends)}: expected at most {days} days after its start; extend it later")
    return silence


def check_source(before: Silence, made: Silence) -> None:
    """Raises UsageError if a person changes times or matchers of a window that follows a reservation of Slurm."""
    if not before.source.startswith(SLURM) or (
        (before.starts, before.ends) == (made.starts, made.ends) and are_equal(before.matchers, made.matchers)
    ):
        return
    name = before.source.removeprefix(SLURM)
    raise UsageError(
        f"maintenance {before.id}: follows Slurm's reservation {name}, whose next reading would undo this; change the "
        f"reservation (scontrol update ReservationName={name} EndTime=...), or add a window of your own "
        "(fleetpulse maintenance add)"
    )


def make_scope_matchers(scopes: Sequence[str]) -> tuple[Matcher, ...]:
    """Returns the matcher of entities and all below them. Raises UsageError."""
    for scope in scopes:
        if ":" not in scope.strip(":"):
            raise UsageError(f"scope = {scope[:200]!r}: expected an entity such as rack:r12")
    return (make_list(SCOPE, scopes),)


def from_mute(mute: Mute) -> Silence:
    """Returns the silence that a mute is."""
    named = (("detector", mute.detector), (SCOPE, mute.scope))
    matchers = tuple(Matcher(name, value) for name, value in named if value != ANY)
    changed, by = (mute.since, mute.user) if mute.ended is None else (mute.ended, mute.ended_by or "")
    about = (mute.since, mute.until, mute.user, mute.reason, mute.since, changed, by, mute.version)
    return Silence(mute.id, "mute", matchers, *about, mute.ended, mute.ended_by, "mutes")


def to_mute(silence: Silence) -> Mute:
    """Returns the mute that a silence of that kind is."""
    value = {m.name: m.value for m in silence.matchers}
    about = (silence.starts, silence.ends, silence.reason, silence.author, silence.expired, silence.expired_by)
    return Mute(silence.id, value.get("detector", ANY), value.get(SCOPE, ANY), *about)


_COLUMNS = """id, kind, matchers, epoch_us(starts), epoch_us(ends), author, reason, epoch_us(created),
    epoch_us(updated), updated_by, version, epoch_us(expired), expired_by, source"""
_END = "least(ends, coalesce(expired, ends)) + INTERVAL 15 MINUTE"


def save_silence(connection: duckdb.DuckDBPyConnection, s: Silence) -> None:
    """Stores a silence, in place of an earlier version of it."""
    connection.execute(
        """INSERT OR REPLACE INTO silences VALUES ($1, $2, $3, make_timestamptz($4::BIGINT),
           make_timestamptz($5::BIGINT), $6, $7, make_timestamptz($8::BIGINT), make_timestamptz($9::BIGINT), $10, $11,
           make_timestamptz($12::BIGINT), $13, $14)""",
        [
            *(s.id, s.kind, json.dumps([m.as_stored() for m in s.matchers]), s.starts, s.ends, s.author, s.reason),
            *(s.created, s.updated, s.updated_by, s.version, s.expired, s.expired_by, s.source),
        ],
    )


def load_silences(connection: duckdb.DuckDBPyConnection, since: int | None = None) -> list[Silence]:
    """Returns the silences, newest first; with `since` those that have not ended then, with any grace."""
    rows = connection.execute(
        f"""SELECT {_COLUMNS} FROM silences WHERE $1 IS NULL OR {_END} > make_timestamptz($1::BIGINT)
            ORDER BY created DESC, id""",
        [since],
    ).fetchall()
    names = [f.name for f in fields(Silence)]
    return [
        Silence(**{**dict(zip(names, row, strict=True)), "matchers": tuple(map(read_matcher, json.loads(row[2])))})
        for row in rows
    ]


def find_matching(silences: Iterable[Silence], labels: Labels, now: int) -> tuple[str, ...]:
    """Returns the ids of the active silences that match, by id."""
    return tuple(sorted(s.id for s in silences if s.state(now) == "active" and s.matches(labels)))


def expire(silence: Silence, by: str, now: int) -> Silence:
    """Returns the silence, ended now. Raises UsageError if it has ended."""
    if silence.end <= now or silence.expired is not None:
        raise UsageError(f"silence {silence.id}: has ended")
    return replace(
        silence, expired=min(now, silence.ends), expired_by=by, updated=now, updated_by=by, version=silence.version + 1
    )
