"""Alerts in Alertmanager's webhook format (payload version 4): one alert per incident, one payload per receiver.

Labels are the identity of an alert and do not change while it fires; everything else is in the annotations. An alert is
sent when an incident opens, reopens or first reaches a severity that is sent. If its labels change, one body resolves
the old alert and fires the new one. The outbox stores this body for every receiver, with the object `fleetpulse` of
what it has no field for; receivers make their own requests of it when they are sent.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.incidents.changes import REPEATED, Change, ChangeKind
from pipeline.incidents.desk import ACTOR
from pipeline.incidents.ledger import Payload
from pipeline.incidents.silences import SEVERITY, STORM_OF, STORM_RECEIVERS, alert_name
from pipeline.incidents.storms import STORM, list_receivers
from pipeline.model.entity_names import entity_name
from pipeline.model.places import find_ancestor
from pipeline.model.records import Caller, Incident, iso
from pipeline.model.topology import Topology
from pipeline.notify.receivers import Endpoint
from pipeline.notify.routes import SEPARATOR, Rules, show_labels

STILL_FIRING = "0001-01-01T00:00:00Z"
"""`endsAt` of every firing alert: Go's zero time, as Alertmanager sends it."""
WATCHDOG = "Watchdog"


@dataclass(frozen=True, slots=True)
class AlertSource:
    """Site and dashboard address in every request body."""

    site: str
    external_url: str = ""


ALERT_FIELDS = ("status", "labels", "annotations", "startsAt", "endsAt", "generatorURL", "fingerprint")
RECEIVER_PREFIX = "receiver-"
"""Prefix of the label `incident` of alerts about a failing receiver."""
Alert = dict[str, Any]


def make_labels(incident: Incident, site: str, place: Mapping[str, str] = {}) -> dict[str, str]:
    """Returns the labels, which are the identity of the alert. place: where the entity is, such as node and rack."""
    found = {
        **place,
        "alertname": alert_name(incident.detector),
        "severity": SEVERITY[incident.severity],
        "entity": incident.entity,
        "cause": incident.cause,
        "detector": incident.detector,
        "incident": incident.id,
        "site": site,
    }
    if incident.life.storm:
        of, receivers = incident.life.storm[0], list_receivers(incident.life.storm)
        found |= {STORM_OF: of} | ({STORM_RECEIVERS: SEPARATOR.join(receivers)} if receivers else {})
    return {**found, "simulated": "true"} if incident.simulated else found


def make_alert(
    incident: Incident,
    own: Mapping[str, str],
    external_url: str,
    ended: int | None = None,
    more: Mapping[str, str] = {},
) -> Alert:
    """Returns one alert with labels `own`; with `ended` a resolved one. It never ends before it starts, which
    Alertmanager refuses. more: further annotations, such as who suffers and what to do."""
    link = f"{external_url}/incident?id={incident.id}" if external_url else ""
    notes = {
        "summary": incident.summary,
        "description": _describe(incident),
        "dashboard_url": link,
        **more,
    }
    if incident.confidence is not None:
        notes["confidence"] = f"{incident.confidence:.2f}"
    return {
        "status": "firing" if ended is None else "resolved",
        "labels": dict(own),
        "annotations": {name: text for name, text in notes.items() if text},
        "startsAt": iso(incident.opened),
        "endsAt": STILL_FIRING if ended is None else iso(max(ended, incident.opened)),
        "generatorURL": link,
        "fingerprint": compute_fingerprint(own),
    }


def make_body(
    alerts: Sequence[Mapping[str, Any]],
    group: Mapping[str, str],
    receiver: str,
    external_url: str,
    reason: str,
    key: str = "",
) -> dict[str, Any]:
    """Returns the request body of a group of alerts; it fires while one of them does. key: `groupKey`, if the group is
    that of a route."""
    return {
        "version": "4",
        "groupKey": key or f"{{}}:{show_labels(group)}",
        "truncatedAlerts": 0,
        "status": "firing" if any(a["status"] == "firing" for a in alerts) else "resolved",
        "receiver": receiver,
        "groupLabels": dict(group),
        "commonLabels": _common_items([a["labels"] for a in alerts]),
        "commonAnnotations": _common_items([a["annotations"] for a in alerts]),
        "externalURL": external_url,
        "notification_reason": reason,
        "routeLabels": {},
        "alerts": [{name: alert[name] for name in ALERT_FIELDS} for alert in alerts],
    }


def make_watchdog(source: AlertSource, started: int, receiver: str) -> dict[str, Any]:
    """Returns the Watchdog alert, which always fires while the pipeline works; its absence is the alarm."""
    entity = f"site:{source.site}"
    own = {"alertname": WATCHDOG, "severity": "none", "entity": entity, "cause": entity, "detector": "watchdog"}
    own |= {"incident": "watchdog", "site": source.site}
    one = {
        "status": "firing",
        "labels": own,
        "annotations": {"summary": f"Watchdog of {entity}: always firing; its absence is the alarm"},
        "startsAt": iso(started),
        "endsAt": STILL_FIRING,
        "generatorURL": source.external_url,
        "fingerprint": compute_fingerprint(own),
    }
    return make_body([one], {"incident": "watchdog"}, receiver, source.external_url, "repeat interval elapsed")


def make_receiver_down(
    source: AlertSource, failing: str, text: str, receiver: str, since: int, ended: int | None
) -> dict[str, Any]:
    """Returns the body that reports to `receiver` that `failing` accepts no alerts, or accepts them again since
    `ended`."""
    entity, incident = f"site:{source.site}", f"{RECEIVER_PREFIX}{failing}"
    own = {"alertname": "ReceiverDown", "severity": "critical", "entity": entity, "cause": entity}
    own |= {"detector": "notifier", "incident": incident, "receiver": failing, "site": source.site}
    one = {
        "status": "firing" if ended is None else "resolved",
        "labels": own,
        "annotations": {"summary": f"Receiver {failing} accepts no alerts", "description": f"Last answer: {text}"},
        "startsAt": iso(since),
        "endsAt": STILL_FIRING if ended is None else iso(ended),
        "generatorURL": source.external_url,
        "fingerprint": compute_fingerprint(own),
    }
    reason = "first notification" if ended is None else "all alerts resolved"
    return make_body([one], {"incident": incident}, receiver, source.external_url, reason)


def compute_fingerprint(own: Mapping[str, str]) -> str:
    """Returns 16 hex digits: FNV-1a over the sorted labels, as `LabelsToSignature` of prometheus/common."""
    text = b"".join(part.encode() + b"\xff" for name in sorted(own) for part in (name, own[name]))
    return f"{hash_fnv1a(text):016x}"


def hash_fnv1a(data: bytes) -> int:
    """Returns the 64-bit FNV-1a hash; basis and prime from draft-eastlake-fnv."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def _common_items(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {k: v for k, v in tables[0].items() if all(t.get(k) == v for t in tables)}


def _describe(incident: Incident) -> str:
    """Returns since when, the suspected cause and the affected devices, in the words of titles."""
    since, named = f"{iso(incident.onset)[:19]}Z", _list_members(incident.members)
    if incident.detector == STORM:
        further = f"Further {incident.severity}s since {since}"
        return f"{further} are listed on this incident, not sent one by one. Causes: {named}"
    number = len(incident.members)
    affected = f"{number} {'entity' if number == 1 else 'entities'} affected since {since}"
    cause = "" if incident.members == (incident.cause,) else f", suspected cause {entity_name(incident.cause)}"
    return f"{affected}{cause}: {named}"


def _list_members(members: Sequence[str], most: int = 10) -> str:
    """Returns the first members, and the number of the others."""
    rest = len(members) - most
    return ", ".join(map(entity_name, members[:most])) + (f" and {rest} more" if rest > 0 else "")


EXTENSION = "fleetpulse"
"""Object of a stored body with what Alertmanager's format has no field for."""
PLACES = ("row", "rack", "node", "gpu", "leaf", "rail", "loop", "job")
"""Labels that say where an entity is, by the kinds of its ancestors."""
MAX_PLACED = 20_000
"""Incidents whose place is remembered. Chosen: more than are ever open, 10 MB."""


class PayloadPlanner:
    """Makes the outbox rows of changes: for which receivers, with which alerts, and whether they are held.

    annotate:  incident -> further annotations: `impact`, `suggested_action`, `runbook_url`.
    locate:    entity -> where it is, as labels.   The place of an incident is fixed while its entity stays the same,
               since labels are the identity of its alert.
    read_sent: incidents -> labels of the newest stored alert of each that has one, after a restart.
    undecided: endpoints with groups or held messages from before the start, also if there are no routes any more:
               their messages are held too, so that all of an incident are decided about together.
    holding:   endpoints of which messages are held.
    """

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        rules: Rules,
        source: AlertSource,
        locate: Callable[[str], Mapping[str, str]],
        read_sent: Callable[[Sequence[str]], Mapping[str, Mapping[str, str]]],
        annotate: Callable[[Incident, None], Mapping[str, str]] = lambda incident, _: {},
        undecided: Collection[str] = frozenset(),
    ) -> None:
        self._annotate = annotate
        self._endpoints, self._rules, self._source = endpoints, rules, source
        self.holding = frozenset(n for n, one in endpoints.items() if one.groups and (rules.hold or n in undecided))
        self._locate, self._read_sent = locate, read_sent
        self._places: OrderedDict[str, tuple[str, Mapping[str, str]]] = OrderedDict()

    def plan(self, changes: Sequence[Change], now: int) -> list[Payload]:
        """Returns the rows of changes, to be sent from `now` on."""
        told = [change for change in changes if change.kind != "retitled"]
        self.label_all(change.before for change in told if change.before is not None)  # one query finds all places
        return [payload for change in told for payload in self._plan(change, now)]

    def plan_unsent(self, incident: Incident, sent: Collection[str], now: int) -> Iterator[Payload]:
        """Yields the rows of an open incident for the endpoints that it goes to and that are not in `sent`.

        One that a person acknowledged is news only for an endpoint that mirrors all alerts.
        """
        labels = self.label(incident)
        change = Change("opened", incident, incident.opened, ACTOR, "the receiver, or its route, is new")
        for name in sorted(self._find_receivers(incident, labels) - set(sent)):
            if incident.state != "acknowledged" or self._endpoints[name].resend_s:
                yield from self._emit(name, change, [self._alert(incident, labels)], "firing", now)

    def plan_missed(
        self,
        incident: Incident,
        sent: Mapping[str, Alert],
        acknowledged: Collection[str],
        now: int,
        before: Mapping[str, Sequence[Alert]],
    ) -> Iterator[Payload]:
        """Yields the rows of an incident for endpoints that have an alert of it, from before they were configured
        again: its end, with other labels its newest state, or its acknowledgement.

        sent: endpoint -> the alert that it was sent.   acknowledged: endpoints that got its acknowledgement since.
        before: endpoint -> the ends of alerts before that one, if nobody knows whether they arrived.
        """
        fires = incident.resolved is None and not incident.life.silenced_by
        kind: ChangeKind = "updated" if fires else "resolved"
        change = Change(kind, incident, now, ACTOR, "the receiver was not configured when it happened")
        labels = self.label(incident) if fires else {}
        receivers = self._find_receivers(incident, labels) if fires else set()
        for name in sorted(sent.keys() & self._endpoints.keys()):
            ended = {**sent[name], "status": "resolved", "endsAt": iso(max(incident.resolved or now, incident.opened))}
            is_same = fires and compute_fingerprint(labels) == ended["fingerprint"]
            if not is_same and name not in receivers:
                old = () if self._groups(name) else before.get(name, ())  # a group ends its own
                yield from self._emit(name, change, [*old, ended], "resolved", now)
                continue
            firing = self._alert(incident, labels)
            if not is_same:
                yield from self._emit(name, change, [ended, firing], "firing", now)
            if not is_same or name not in acknowledged:
                yield from self._acknowledge_again(name, change, firing, now)

    def label(self, incident: Incident, is_new: bool = False) -> dict[str, str]:
        """Returns the labels of an incident's alert. is_new: none was stored before."""
        return self._label([incident], is_new)[incident.id]

    def list_routed(self, incident: Incident) -> set[str]:
        """Returns the receivers to which routes lead an incident; without routes none. It reads no store: it is asked
        for each page of a storm."""
        if self._rules.top is None:
            return set()
        known = self._places.get(incident.id)
        place = known[1] if known is not None and known[0] == incident.entity else self._locate(incident.entity)
        return {node.receiver for node in self._rules.match(make_labels(incident, self._source.site, place))}

    def label_all(self, incidents: Iterable[Incident]) -> dict[str, dict[str, str]]:
        """Returns the labels of the alert of each incident, by its id; at most one query for all."""
        return self._label(list(incidents))

    def _label(self, incidents: Sequence[Incident], are_new: bool = False) -> dict[str, dict[str, str]]:
        unknown = [] if are_new else [i.id for i in incidents if i.id not in self._places]
        stored = self._read_sent(unknown) if unknown else {}
        found = {i.id: make_labels(i, self._source.site, self._find_place(i, stored.get(i.id))) for i in incidents}
        while len(self._places) > MAX_PLACED:
            self._places.popitem(last=False)
        return found

    def _find_place(self, incident: Incident, sent: Mapping[str, str] | None) -> Mapping[str, str]:
        """Returns where an incident is: as known here, else as its stored alert `sent` says, else where it is now."""
        known = self._places.get(incident.id)
        if known is not None and known[0] == incident.entity:
            return known[1]
        if sent is not None and sent.get("entity") == incident.entity:
            place: Mapping[str, str] = {name: sent[name] for name in PLACES if name in sent}
        else:
            place = self._locate(incident.entity)
        self._places[incident.id] = (incident.entity, place)
        return place

    def _plan(self, change: Change, now: int) -> Iterator[Payload]:
        incident, before = change.incident, change.before
        old = self.label(before) if before is not None else {}
        labels = self.label(incident, is_new=before is None)
        if incident.resolved is not None:
            for name in self._endpoints:
                yield from self._emit(name, change, [self._alert(incident, labels, incident.resolved)], "resolved", now)
            return
        if incident.is_held_back and before is not None and old != labels:  # else the old alert would fire for ever
            for name in self._endpoints:
                yield from self._emit(name, change, [self._alert(before, old, change.time)], "resolved", now)
            return
        if change.receivers:
            for name in (n for n, endpoint in self._endpoints.items() if endpoint.receiver in change.receivers):
                yield from self._emit(name, change, [self._alert(incident, labels)], "firing", now)
            return
        was_open = before is not None and before.resolved is None
        had = self._find_receivers(before, old) if was_open and before is not None else set()
        has = self._find_receivers(incident, labels)
        firing = self._alert(incident, labels)
        for name in self._endpoints:
            if name not in had | has:  # it may have it: by other routes, an escalation, or from before a storm
                if before is None:
                    continue
                if old != labels or change.kind == "silenced":
                    yield from self._emit(name, change, [self._alert(before, old, change.time)], "resolved", now)
                elif self._endpoints[name].reports(change.kind):
                    yield from self._emit(name, change, [firing], "update", now)
                continue
            is_due = name not in had and (self._endpoints[name].resend_s or not _is_owned_again(change))
            if name in has and (is_due or change.kind in (*REPEATED, "reopened")):
                yield from self._emit(name, change, [firing], "firing", now)
            elif name in has and old != labels and before is not None:
                yield from self._emit(name, change, [self._alert(before, old, change.time), firing], "firing", now)
                yield from self._acknowledge_again(name, change, firing, now)
            elif name not in has and before is not None and (not incident.is_held_back or change.kind == "silenced"):
                yield from self._emit(name, change, [self._alert(before, old, change.time)], "resolved", now)
            elif self._endpoints[name].reports(change.kind):
                yield from self._emit(name, change, [firing], "update", now)

    def _acknowledge_again(self, name: str, change: Change, alert: Alert, now: int) -> Iterator[Payload]:
        """Yields the acknowledgement of an alert that the receiver may know without it, as it was removed in between,
        or the alert silenced. It would page for what a person works on."""
        if change.incident.state == "acknowledged" and self._endpoints[name].reports("acknowledged"):
            by = change.incident.life.acknowledged_by
            again = replace(change, kind="acknowledged", actor=ACTOR, comment=f"as before by {by}")
            yield from self._emit(name, again, [alert], "update", now)

    def _find_receivers(self, incident: Incident, labels: Mapping[str, str]) -> set[str]:
        """Returns the endpoints that are sent this incident now; none while it is silenced."""
        return set() if incident.is_held_back else self._find_takers(incident, labels)

    def is_for_people(self, incident: Incident, labels: Mapping[str, str]) -> bool:
        """Returns whether any endpoint takes an incident of its severity and route, also one that is silenced now."""
        return bool(self._find_takers(incident, labels))

    def _find_takers(self, incident: Incident, labels: Mapping[str, str]) -> set[str]:
        chosen = None if self._rules.top is None else {node.receiver for node in self._rules.match(labels)}
        return {
            name
            for name, endpoint in self._endpoints.items()
            if (chosen is None or endpoint.receiver in chosen) and (incident.severity != "watch" or endpoint.send_watch)
        }

    def _alert(self, incident: Incident, labels: Mapping[str, str], ended: int | None = None) -> Alert:
        return make_alert(incident, labels, self._source.external_url, ended, self._annotate(incident, None))

    def _emit(self, name: str, change: Change, alerts: Sequence[Alert], kind: Kind, now: int) -> Iterator[Payload]:
        """Yields the rows of one receiver: one with all alerts, or one per alert where routes group."""
        if not self._groups(name):
            yield self._make_row(name, change, alerts, kind, now, name in self.holding)
            return
        for alert in alerts:
            one: Kind = kind if kind == "update" else "firing" if alert["status"] == "firing" else "resolved"
            yield self._make_row(name, change, [alert], one, now, True)

    def _groups(self, name: str) -> bool:
        """Returns whether routes group the alerts of an endpoint."""
        return self._endpoints[name].groups and self._rules.top is not None

    def _make_row(
        self, name: str, change: Change, alerts: Sequence[Alert], kind: Kind, now: int, held: bool
    ) -> Payload:
        reason = "first notification" if len(alerts) == 1 else "new alerts added"
        reason = "all alerts resolved" if kind == "resolved" else "unknown" if kind == "update" else reason
        incident, receiver = change.incident.id, self._endpoints[name].receiver
        body = make_body(alerts, {"incident": incident}, receiver, self._source.external_url, reason)
        body[EXTENSION] = _make_extension(change)
        state: Literal["pending", "held"] = "held" if held else "pending"
        shows = self._endpoints[name].edits and change.kind in ("unsilenced", "resolved") and kind != "firing"
        text = json.dumps(body, separators=(",", ":"))
        return Payload(incident, name, kind, text, now, state, after_silence=shows and not self._groups(name))


Kind = Literal["firing", "resolved", "update"]


def _is_owned_again(change: Change) -> bool:
    """Returns whether receivers do not have what a person has acknowledged: a silence of it ended, or it was split from
    what was acknowledged. It is news only for what mirrors all alerts."""
    return change.kind in ("unsilenced", "opened") and change.incident.state == "acknowledged"


def _make_extension(change: Change) -> dict[str, Any]:
    was_owned = change.before is not None and change.before.state == "acknowledged"
    at = change.actor.receiver if isinstance(change.actor, Caller) else ""
    return {
        "event": change.kind,
        "acknowledgement_ended": was_owned and change.incident.state == "open",
        "actor": change.actor,
        "comment": change.comment,
        "time": iso(change.time),
        "incident": change.incident.as_json(),
        **({"receiver": at} if at else {}),
    }


def locate_entity(topology: Topology, entity: str) -> dict[str, str]:
    """Returns where an entity is: the names of its ancestors, and its own, by the kinds of PLACES."""
    found = {}
    for kind in PLACES:
        ancestor = find_ancestor(entity, kind, topology)
        if ancestor is not None:
            found[kind] = ancestor.partition(":")[2]
    return found
