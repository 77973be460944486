"""The oracle of alert worlds: compares what receivers got over HTTP with what is true of the incidents.

It judges from outside, as an engineer on call does: what fires there that is over, what is open and fires nowhere, what
was sent while it had to wait. It reads messages and the rows of the outbox, and nothing of the notifier's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.incidents.changes import Change
from pipeline.model.records import SECOND
from tests.pipeline.alert_receivers import Inbox, PagerDutyView, Received, Shown, WebhookView, freeze
from tests.pipeline.alert_settings import NAMES, Setting, seconds
from tests.pipeline.alert_site import WorldSite
from tests.pipeline.alert_truth import HOLDS, NEVER, Truth

OWN = ("watchdog", "receiver-")
"""Starts of the label `incident` of alerts about the pipeline itself."""
ALONE = "documented: end alone of what was sent in a group"
"""PagerDuty takes a resolve of a key that was never triggered as nothing; docs/receivers.md says that it comes, also
of a page that was silenced before it arrived."""
PAGED_AGAIN = "acknowledgement_expired"


@dataclass(frozen=True)
class Violation:
    """rule: what is broken.   act: number of the act after which it was seen.   held, expected: in words."""

    rule: str
    act: int
    receiver: str
    incident: str
    held: str
    expected: str

    def __str__(self) -> str:
        return f"act {self.act}: {self.rule} | {self.receiver} {self.incident} | {self.held} | {self.expected}"


class Last(NamedTuple):
    """The newest message of a group. step: of the world; time: UTC us; firing, resolved: labels of its alerts."""

    step: int
    time: int
    firing: frozenset[Any]
    resolved: frozenset[Any]


@dataclass(frozen=True)
class Owed:
    """A page that is due since an acknowledgement expired."""

    receiver: str
    incident: str
    step: int
    time: int


class Oracle:
    """Judges one world. act: number of the act that runs.   received: lines of a trace."""

    def __init__(self, site: WorldSite, inboxes: Mapping[str, Inbox]) -> None:
        self.site, self.inboxes, self.act = site, inboxes, 0
        self.views: dict[str, WebhookView | PagerDutyView] = {
            name: PagerDutyView() if name == "pager" else WebhookView() for name in NAMES
        }
        self.truth = Truth(site.topology, site.setting)
        self.settings: list[Setting] = [site.setting]
        self.violations: dict[tuple[str, str, str], Violation] = {}
        self.lines: list[str] = []
        self._drained = dict.fromkeys(NAMES, -1)  # step at which a receiver had got all that was due
        self._up_since = dict.fromkeys(NAMES, site.now)
        self._last: dict[tuple[str, str], Last] = {}
        self._members: dict[tuple[str, str], set[str]] = {}  # receiver, group -> incidents that it ever listed
        self._owed: list[Owed] = []
        self._started = 0  # step of the newest start
        self._sent_incidents: set[tuple[str, str]] = set()
        self._fired_at: dict[tuple[str, Any], int] = {}  # receiver, labels -> step of the newest message
        site.on_change = self.note_change

    def report(self, rule: str, receiver: str, incident: str, held: str, expected: str) -> None:
        """Records a violation, once for each rule, receiver and incident."""
        if (rule, receiver, incident) not in self.violations:
            made = Violation(rule, self.act, receiver, incident, held, expected)
            self.violations[rule, receiver, incident] = made
            self.lines.append(f"        !! {made}")

    # --- what happens ---------------------------------------------------------------------------------

    def note_change(self, made: Sequence[Change]) -> None:
        """A commit changed incidents."""
        self.truth.step, self.truth.now = self.truth.step + 1, self.site.now
        self.truth.update(self.site.life.shown.values(), made)
        for change in made:
            self.lines.append(f"    - {change.kind} {change.incident.id}: {self.truth.describe(change.incident.id)}")
            if change.kind == PAGED_AGAIN and self.truth.facts[change.incident.id].pages:
                labels = dict(self.truth.facts[change.incident.id].labels)
                for name in set(self.truth.setting.list_receivers(labels)):
                    self._owed.append(Owed(name, change.incident.id, self.truth.step, self.site.now))

    def note_setting(self) -> None:
        """The pipeline runs with another configuration now."""
        self.truth.step, self.truth.setting = self.truth.step + 1, self.site.setting
        self.truth.configured = self.truth.step
        self.settings.append(self.site.setting)
        self.truth.update(self.site.life.shown.values())
        self._owed = []
        for name in NAMES:
            self._up_since[name] = self.site.now

    def note_start(self) -> None:
        """The pipeline started again."""
        self.truth.step += 1
        self._started = self.truth.step

    def note_mode(self, name: str) -> None:
        """A receiver went away or returned."""
        self._up_since[name] = self.site.now

    def read_inboxes(self) -> None:
        """Takes over what receivers got, and notes which of them have got everything."""
        self.truth.now = self.site.now
        for name, inbox in self.inboxes.items():
            for key, body in inbox.read():
                received = self.views[name].receive(key, body)
                if received is not None:
                    self._receive(name, received)
            for text in inbox.refused:
                self.report("refused by the receiver", name, "", text, "a valid request")
            inbox.refused.clear()
        waiting = self._count_waiting()
        for name in self.site.setting.receivers:
            if self.inboxes[name].mode == "up" and not waiting.get(name):
                self.truth.step += 1
                self._drained[name] = self.truth.step
                self._check_groups(name)

    def _count_waiting(self) -> dict[str, int]:
        return dict(self._query("SELECT receiver, count(*) FROM outbox WHERE state = 'pending' GROUP BY receiver"))

    def _query(self, query: str) -> list[Any]:
        assert self.site.database is not None
        return self.site.database.connection.execute(query).fetchall()

    # --- one message ----------------------------------------------------------------------------------

    def _receive(self, name: str, received: Received) -> None:
        alerts = [*received.firing, *received.resolved]
        if any(labels["incident"] == "watchdog" for labels in alerts):
            return
        self.truth.step += 1
        said = [f"{a['incident']}({a['severity']} {a['cause']})" for a in received.firing]
        ended = [f"{a['incident']}({a['severity']} {a['cause']})" for a in received.resolved]
        text = f"{received.action} {received.group} firing={','.join(said)} resolved={','.join(ended)}"
        self.lines.append(f"        > {name}: {text}{' (again)' if received.repeats else ''}")
        if not received.repeats and not any(a["incident"].startswith(OWN) for a in alerts):
            self._check_message(name, received)
        self.views[name].apply(received)
        members = self._members.setdefault((name, received.group), set())
        members |= {labels["incident"] for labels in received.firing}
        self._sent_incidents |= {(name, labels["incident"]) for labels in received.firing}
        self._fired_at |= {(name, freeze(labels)): self.truth.step for labels in received.firing}
        if received.firing:
            self._owed = [
                o
                for o in self._owed
                if o.receiver != name or not any(labels["incident"] == o.incident for labels in received.firing)
            ]

    def _check_message(self, name: str, received: Received) -> None:
        view, text = self.views[name], f"{received.action} of {received.group}"
        for labels in received.firing:
            self._check_firing(name, labels, text)
        self._check_repeat(name, received)
        if isinstance(view, WebhookView):
            for labels in received.resolved:
                self._check_end(name, labels, received.group)
        elif received.action == "resolve" and received.group not in view.triggered:
            is_known = (name, received.group) in self._sent_incidents or self._was_left_out(name, received.group)
            self.report(ALONE if is_known else "end of what was never sent", name, received.group, text, "no event")

    def _was_left_out(self, name: str, incident: str) -> bool:
        """Returns whether its page was left out, which the receiver may have taken: its end is sent alone."""
        query = """SELECT receiver, incident FROM outbox
                   WHERE (state = 'muted' AND answer = 'silenced before it was sent')
                   OR (state = 'dead' AND starts_with(answer, 'the receiver is no longer configured; '))"""
        return (name, incident) in self._query(query)

    def _check_firing(self, name: str, labels: dict[str, str], text: str) -> None:
        """What was true before the receiver had got everything decides: nothing that was sent since is older."""
        truth, incident, drained = self.truth, labels["incident"], self._drained[name]
        facts = truth.facts.get(incident)
        if facts is None:
            self.report("unknown incident", name, incident, text, "none")
            return
        for fact in HOLDS:
            if getattr(facts, fact) and truth.free_until(incident, fact) < max(drained, 0):
                self.report(f"fires: {fact}", name, incident, text, truth.describe(incident))
        if freeze(labels) != facts.labels and truth.since[incident, "labels"].step < drained:
            self.report("fires: old labels", name, incident, text, truth.describe(incident))
        is_known = (name, incident) in self._sent_incidents
        is_alone = all(one.route is None for one in self.settings)
        if truth.held_since(incident, "owned") < drained and is_alone and not is_known:
            self.report("fires: acknowledged before it was sent", name, incident, text, truth.describe(incident))
        is_led = name in truth.setting.list_receivers(labels)
        if not is_led and truth.configured < drained and freeze(labels) not in self.views[name].fired:
            self.report("fires: no route leads here", name, incident, text, truth.describe(incident))

    def _check_end(self, name: str, labels: dict[str, str], group: str) -> None:
        truth, incident = self.truth, labels["incident"]
        if not self.views[name].has_fired(labels, group):
            rule = ALONE if self._was_left_out(name, incident) else "end of what was never sent"
            self.report(rule, name, incident, f"resolved in {group}", truth.describe(incident))
            return
        facts, print_ = truth.facts[incident], freeze(labels)
        if print_ != facts.labels or facts.resolved or facts.silenced or facts.storm:
            return
        since = max(truth.since[incident, fact].step for fact in ("open", "silenced", "storm", "labels"))
        if since < min(self._drained[name], self._fired_at.get((name, print_), -1)):
            self.report("ended, but it is open", name, incident, f"resolved in {group}", truth.describe(incident))

    def _check_repeat(self, name: str, received: Received) -> None:
        """A message that says nothing new is due only after repeat_interval, or after a change."""
        if received.action == "acknowledge":
            return
        firing, resolved = frozenset(map(freeze, received.firing)), frozenset(map(freeze, received.resolved))
        last = self._last.get((name, received.group))
        self._last[name, received.group] = Last(self.truth.step, self.site.now, firing, resolved)
        if last is None or not firing or not (firing <= last.firing and resolved <= last.resolved):
            return
        told = {labels["incident"] for labels in (*received.firing, *received.resolved)}
        changed = max((self.truth.changed.get(one, NEVER) for one in told), default=NEVER)
        if max(changed, self.truth.configured) > last.step or self._drained[name] < last.step:
            return
        if self._up_since[name] > last.time - 60 * SECOND or self._drained[name] < self._started:
            return  # an answer may have been lost: at least once
        routes = [r for one in received.firing for r in self.truth.setting.list_routes(one) if r.receiver == name]
        repeat = min((seconds(r.repeat_interval) for r in routes if r.repeat_interval), default=NEVER)
        if self.site.now - last.time < repeat * SECOND:
            rule = "said twice" if routes else "repeated, but no route leads here"
            self.report(rule, name, ",".join(sorted(told)), f"in {received.group}", "nothing, nothing changed")

    def _check_groups(self, name: str) -> None:
        """One alert fires in one group, unless two routes lead to the receiver."""
        view = self.views[name]
        found: dict[Any, set[str]] = {}
        for one in view.list_shown():
            found.setdefault(freeze(one.labels), set()).add(one.group)
        for print_, groups in found.items():
            labels = dict(print_)
            if len(groups) < 2 or labels["incident"].startswith(OWN):
                continue
            if all(setting.list_receivers(labels).count(name) < 2 for setting in self.settings):
                self.report("fires in two groups", name, labels["incident"], " and ".join(sorted(groups)), "in one")

    # --- quiet points ---------------------------------------------------------------------------------

    def is_waiting(self) -> bool:
        """Returns whether messages wait for a receiver that is configured."""
        waiting = self._count_waiting()
        return any(waiting.get(name) for name in self.site.setting.receivers)

    def check_quiet(self, is_end: bool = False) -> None:
        """Judges what receivers hold after a time in which each of them could get everything."""
        patience = self.site.setting.patience_s
        refused = {
            name
            for (name,) in self._query(
                "SELECT DISTINCT receiver FROM outbox WHERE state = 'dead' AND answer LIKE '% times'"
            )
        }
        for name in self.site.setting.receivers:
            has_waited = (self.site.now - self._up_since[name]) >= patience * SECOND
            if self.inboxes[name].mode != "up" or not has_waited or name in refused:
                continue
            for one in self.views[name].list_shown():
                self._check_shown(name, one, patience, is_end)
            self._check_missing(name, patience)
            self._check_owed(name, patience)
            self._check_taken(name, patience)
        self._check_rows(patience, is_end)

    def _check_shown(self, name: str, one: Shown, patience: int, is_end: bool) -> None:
        held = f"fires in {one.group} as {one.labels['severity']} {one.labels['cause']}"
        if one.incident.startswith(OWN):
            if is_end:
                self.report(
                    f"fires for ever: ReceiverDown{self._was_removed(name)}",
                    name,
                    one.incident,
                    held,
                    "all receivers answer",
                )
            return
        facts, expected = self.truth.facts.get(one.incident), self.truth.describe(one.incident)
        if facts is None:
            return
        for fact in ("resolved", "silenced"):
            if getattr(facts, fact) and self.truth.age_s(one.incident, fact) >= patience:
                self.report(f"fires for ever: {fact}{self._was_removed(name)}", name, one.incident, held, expected)
                return
        if freeze(one.labels) != facts.labels and self.truth.age_s(one.incident, "labels") >= patience:
            self.report(f"fires for ever: old labels{self._was_removed(name)}", name, one.incident, held, expected)

    def _was_removed(self, name: str) -> str:
        """Returns what the operator did that may explain it, for the name of a rule."""
        return " (receiver was removed once)" if any(name in one.removed for one in self.settings) else ""

    def _check_missing(self, name: str, patience: int) -> None:
        shown: dict[Any, list[Shown]] = {}
        for one in self.views[name].list_shown():
            shown.setdefault(freeze(one.labels), []).append(one)
        for incident, facts in self.truth.facts.items():
            age = min(self.truth.age_s(incident, "pages"), self.truth.age_s(incident, "labels"))
            is_led = name in self.site.setting.list_receivers(dict(facts.labels))
            if not facts.pages or age < patience or not is_led:
                continue
            held, expected = shown.get(facts.labels, []), self.truth.describe(incident)
            if not held:
                self.report("page lost", name, incident, "does not fire", expected)
            elif all(one.is_acknowledged for one in held):
                self.report("page lost: acknowledged there", name, incident, held[0].group, expected)

    def _check_owed(self, name: str, patience: int) -> None:
        for owed in [o for o in self._owed if o.receiver == name]:
            facts = self.truth.facts[owed.incident]
            was_broken = self.truth.held_since(owed.incident, "pages") > owed.step
            labels_changed = self.truth.since[owed.incident, "labels"].step > owed.step
            if not facts.pages or was_broken or labels_changed:
                self._owed.remove(owed)
                continue
            if (self.site.now - owed.time) / SECOND < patience or not self._is_alone(name, owed.incident):
                continue
            grouped = "" if self.truth.setting.route is None else " in its group"
            self.report(f"expired acknowledgement: no page{grouped}", name, owed.incident, "nothing", "fires again")

    def _check_taken(self, name: str, patience: int) -> None:
        """What a person has taken here is taken in PagerDuty: there the next person would be called."""
        keys: dict[str, list[Shown]] = {}
        for one in self.views[name].list_shown() if name == "pager" else ():
            keys.setdefault(one.group, []).append(one)
        for key, shown in keys.items():
            facts = {one.incident: self.truth.facts.get(one.incident) for one in shown}
            all_taken = all(
                known is not None and known.owned and self.truth.age_s(one, "owned") >= patience
                for one, known in facts.items()
            )
            if all_taken and not shown[0].is_acknowledged:
                told = ",".join(sorted(facts))
                is_led = any(name in self.truth.setting.list_receivers(one.labels) for one in shown)
                rule = "acknowledged here, not there" + ("" if is_led else " (no route leads there now)")
                self.report(rule, name, told, f"open in {key}", "acknowledged")

    def _is_alone(self, name: str, incident: str) -> bool:
        """Returns whether no group of the receiver had the incident and another one: then the group gets it."""
        if self.truth.setting.route is None:
            return True
        groups = [members for (at, _), members in self._members.items() if at == name and incident in members]
        return name != "pager" and all(members == {incident} for members in groups)

    def _check_rows(self, patience: int, is_end: bool) -> None:
        """No row waits for an incident that ended long ago; at the end nothing is left."""
        here = set(self.site.setting.receivers)
        rows = self._query(
            "SELECT id, incident, receiver, state FROM outbox WHERE state NOT IN ('delivered', 'muted', 'dead')"
        )
        for id_, incident, receiver, state in rows:
            facts = self.truth.facts.get(incident)
            is_over = facts is not None and facts.resolved and self.truth.age_s(incident, "resolved") >= patience
            is_up = self.site.now - self._up_since[receiver] >= patience * SECOND
            if receiver in here and is_up and (is_over or is_end):
                self.report(f"row stays {state}", receiver, incident, id_, self.truth.describe(incident))
        if not is_end:
            return
        for receiver, id_ in self._query("SELECT receiver, id FROM notify_groups"):
            self.report("group stays", receiver, id_, "in notify_groups", "nothing, all has ended")
        if (trouble := self.site.notifier.describe_trouble()) is not None:
            self.report("trouble", "", "", trouble, "none")


def count_rules(found: Iterable[Violation]) -> dict[str, int]:
    """Returns how often each rule was broken."""
    counts: dict[str, int] = {}
    for one in found:
        counts[one.rule] = counts.get(one.rule, 0) + 1
    return counts
