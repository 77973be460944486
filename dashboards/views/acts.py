"""`/acts?id=`: acts on machines: what waits for approval, one plan with its guards, approve, cancel, propose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import streamlit as st

from dashboards import identity, markup, routes, snapshot
from dashboards.act_answers import Act, ActList, Plan, parse_act, parse_acts
from dashboards.identity import Person
from dashboards.links import Link, Text, entity_link, incident_link
from dashboards.views import parts
from dashboards.views.act_form import Draft, draw_form, draw_result, drop_result, open_proposed, propose, send
from dashboards.views.form_popover import draw_popover, is_open
from dashboards.views.silencing import draw_right
from dashboards.words import ago, amount, clock, joined

MAX_OVER = 50
"""Acts that are over, the newest. Chosen."""
PACKET_S = 30.0
"""Limit of the request for an RMA packet (s). Chosen: it reads two days of a node."""
HARD = frozenset({"evict", "reset", "reboot"})
"""Verbs without an undo: the approver types the node's name."""


class Step(NamedTuple):
    """What may follow an act: verb, level of a diagnostic, text of the button, and the reason."""

    verb: str
    level: str
    label: str
    reason: str


NEXT = (
    Step("diagnose", "3", "Plan a diagnostic of level 3", "check after the repair"),
    Step("diagnose", "link-soak", "Plan a link soak", "check of the links after the repair"),
    Step("release", "", "Plan the release", "repaired and checked"),
)
STATE_TONES: Mapping[str, str] = {"awaiting_approval": "degraded", "failed": "critical", "refused": "critical"}


def page() -> None:
    """Draws the list, or the act in the address."""
    identity = st.query_params.get("id", "").strip()
    parts.draw_refreshing(lambda: _draw(identity))


def _draw(identity: str) -> None:
    open_proposed()
    if identity:
        _draw_one(identity)
    else:
        _draw_list()


# --- the list -------------------------------------------------------------------------------------------


def _draw_list() -> None:
    answer = snapshot.fetch(parse_acts, "acts")
    found, now = answer.value, snapshot.now()
    parts.draw_head("Acts" if found is None else headline(found), [], "", answer, of_now=found is not None)
    parts.draw_error(answer)
    if not is_open("acts-new"):
        drop_result("acts-new")
    if found is None:
        return
    if found.breaker:
        st.html(markup.notice(f"{found.breaker}. People still may act.", "critical", "Policies are stopped."))
    st.html(markup.empty("Modes: " + ", ".join(f"{verb} {mode}" for verb, mode in found.modes.items())))
    if form := draw_popover(st, "Propose an act", "acts-new", primary=True, path="acts"):
        with form:
            draw_form(Draft("acts-new"), found.modes)
    head, none = (
        ("Act", "State", "Requested by", "Incident", "Since", "Reason"),
        partial(parts.last_known, answer=answer),
    )
    open_ = [act for act in found.acts if act.open]
    st.html(markup.section("Open", f"{len(open_):,}") + markup.table(head, act_rows(open_, now), none("No open acts.")))
    held = [act for act in found.acts if act.in_force and not act.open]
    st.html(markup.section("Holds in force", f"{len(held):,}"))
    st.html(markup.table(head, act_rows(held, now), none("No holds in force.")))
    over = [act for act in found.acts if act not in open_ and act not in held][:MAX_OVER]
    st.html(
        markup.section("Closed", f"the newest {MAX_OVER}")
        + markup.table(head, act_rows(over, now), none("No closed acts."))
    )


def is_on_simulated(act: Act) -> bool | None:
    """Returns whether any node of an act is simulated, None while that is not known."""
    fleet = snapshot.fetch_fleet_of(*act.targets).value if act.targets else None
    return any(node.simulated for node in fleet.nodes) if fleet and fleet.nodes else None


def headline(found: ActList) -> str:
    """Returns what waits for a person."""
    waiting = sum(act.state == "awaiting_approval" for act in found.acts)
    return f"{amount(waiting, 'act awaits', 'acts await')} approval" if waiting else "No act awaits approval"


def act_rows(acts: list[Act], now: int) -> list[tuple[Text, ...]]:
    """Returns one row per act."""
    return [
        (
            Link(act.text, routes.href("acts", id=act.id), act.id),
            state_text(act),
            act.requested_by,
            incident_link(act.incident) if act.incident else "",
            ago(act.created, now),
            act.outcome or (f"Waits: {act.waits_for}" if act.waits_for else act.reason),
        )
        for act in acts
    ]


def state_text(act: Act) -> str:
    """Returns the state in words; a dry run says so."""
    state = act.state.replace("_", " ")
    return f"{state} (dry run)" if act.mode == "dry-run" else state


# --- one act --------------------------------------------------------------------------------------------


def _draw_one(identity: str) -> None:
    answer = snapshot.fetch(parse_act, f"acts/{snapshot.quoted(identity)}")
    act, now = answer.value, snapshot.now()
    if act is None:
        parts.draw_head(f"Act {identity}", [], "", answer)
        parts.draw_error(answer)
        return
    badges = [markup.badge(state_text(act).upper(), STATE_TONES.get(act.state, "quiet"))]
    simulated = is_on_simulated(act)
    parts.draw_head(f"{act.text}: {act.reason}", badges, subtitle(act, now), answer, simulated=simulated)
    parts.draw_error(answer)
    draw_result(act)
    targets: list[Text] = [entity_link(target) for target in act.targets]
    if act.incident:
        targets.append(incident_link(act.incident))
    st.html(markup.chips([*targets, Link("All acts", routes.href("acts"))]))
    if act.outcome:
        st.html(markup.notice(act.outcome, "critical" if act.state in ("failed", "refused") else "degraded"))
    if act.waits_for:
        st.html(markup.notice(f"{act.waits_for}.", "degraded", "It waits:"))
    if act.plan is None:
        st.html(markup.notice("The executor plans it within seconds.", "quiet", "Not planned yet."))
    else:
        _draw_plan(act, act.plan)
    _draw_buttons(act)
    if _has_next(act):
        _draw_next(act)
    rows = [(clock(time, now), state.replace("_", " "), who, said) for time, state, who, said in act.history]
    st.html(markup.section("History") + markup.table(("Time", "State", "User", "Comment"), rows, ""))


def subtitle(act: Act, now: int) -> str:
    """Returns id, requester, times and approvals."""
    given = f"approved by {joined([who for who, _ in act.approvals])}" if act.approvals else ""
    until = f"expires {clock(act.expires, now)}" if act.state in ("awaiting_approval", "approved") else ""
    return " · ".join(filter(None, (act.id, f"requested by {act.requested_by} {ago(act.created, now)}", given, until)))


def _draw_plan(act: Act, plan: Plan) -> None:
    st.html(markup.section("Commands", "exactly what the executor runs") + markup.facts(_command_rows(plan)))
    rows = [(g.name.replace("_", " "), g.now, g.limit, guard_result(g.passed, g.overridable)) for g in plan.guards]
    failing = sum(not guard.passed for guard in plan.guards)
    note = f"{failing} of {len(plan.guards)} fail" if failing else f"all {len(plan.guards)} pass"
    st.html(markup.section("Guards", note) + markup.table(("Guard", "Now", "Limit", "Result"), rows, ""))
    jobs = [(entity_link(f"job:{job}", job), str(nodes), str(gpus), account) for job, nodes, gpus, account in plan.jobs]
    st.html(markup.section("Jobs on these nodes"))
    st.html(markup.table(("Job", "Nodes", "GPUs", "Account"), jobs, "No job runs on these nodes."))
    if act.state == "awaiting_approval" and plan.people > 1:
        st.html(markup.notice(f"Two people must stand behind it: {'; '.join(plan.people_why)}.", "degraded"))


def _command_rows(plan: Plan) -> list[tuple[str, Text]]:
    return [(f"{number}", command) for number, command in enumerate(plan.commands, 1)]


def guard_result(passed: bool, overridable: bool) -> str:
    """Returns the result of a guard in words."""
    return "pass" if passed else "FAIL: two people may override it" if overridable else "FAIL: no override"


def _draw_buttons(act: Act) -> None:
    """Draws approve and cancel; both are checked again by the API."""
    if act.state not in ("proposed", "planned", "awaiting_approval", "approved"):
        return
    st.html(markup.section("Decision"))
    if not draw_right(f"acts/{act.id}/approve"):
        return
    who = identity.require()
    waits = act.state == "awaiting_approval" and act.plan is not None
    other, alone = find_bar(act, who.name) if waits else "", waits and may_approve_alone(act, who)
    if other:
        st.html(markup.notice(other, "degraded"))
    st.text_input("Comment", key=f"act-comment-{act.id}", placeholder="What you checked")
    if act.verb in HARD and waits and (alone or not other):
        name = act.targets[0].partition(":")[2]
        st.text_input(f"Type the name of the node ({name}): this cannot be undone", key=f"act-typed-{act.id}")
    row = st.container(horizontal=True)
    if waits and not other:
        row.button("Approve this plan", type="primary", key="act-approve", on_click=_approve, args=(act,))
    if alone:
        with row.popover("Break-glass", key="act-glass"):
            text = "For one administrator alone on call, one node an hour. Operators are notified, and it is reviewed."
            st.html(markup.notice(text, "critical"))
            st.button("Approve alone", key="act-glass-now", on_click=_approve, args=(act, True))
    row.button("Cancel act", key="act-cancel", on_click=_cancel, args=(act,))


def find_bar(act: Act, name: str) -> str:
    """Returns why the person of this name cannot approve the plan; "" if only the API can know. Its rule also compares
    the subjects of the logins, which no page gets."""
    if any(name == given for given, _ in act.approvals):
        return "You approved it: another person must approve."
    if act.plan is not None and act.plan.people > 1 and act.by_person and act.requested_by == name:
        return "You requested it: another person must approve."
    return ""


def may_approve_alone(act: Act, who: Person) -> bool:
    """Returns whether to offer a person the approval alone: an administrator, one node, and no approval of this person
    before."""
    needed = act.plan is not None and act.plan.people > 1
    return (
        needed and len(act.targets) == 1 and who.may("admin") and all(who.name != given for given, _ in act.approvals)
    )


def _draw_next(act: Act) -> None:
    """Draws what follows a hold: a check, and the way back to service. Each button makes a plan and no more."""
    found = snapshot.fetch(parse_acts, "acts", open="true").value
    steps = [step for step in NEXT if found and found.modes.get(step.verb, "off") != "off"]
    if act.verb == "diagnose":
        steps = [step for step in steps if step.verb == "release"]
    if not steps:
        return
    st.html(markup.section("Next", "a check after the repair, then back to service"))
    if not draw_right("acts"):
        return
    row = st.container(horizontal=True)
    for step in steps:
        body = {
            "verb": step.verb,
            "targets": list(act.held if act.in_force else act.targets),
            "reason": f"{step.reason} ({act.id})",
            "incident": act.incident,
            "params": {"level": step.level} if step.level else {},
        }
        row.button(step.label, key=f"act-{step.verb}-{step.level}", on_click=propose, args=(body, act.id))


def _has_next(act: Act) -> bool:
    """Returns whether something follows: nodes are held here, also by a hold that failed, or were just diagnosed."""
    return not act.open and (act.in_force or (act.verb == "diagnose" and act.state == "verified"))


def _approve(act: Act, break_glass: bool = False) -> None:
    body = {
        "plan": act.plan.hash if act.plan else "",
        "comment": _comment(act),
        "typed": str(st.session_state.get(f"act-typed-{act.id}") or "").strip(),
        "break_glass": break_glass,
    }
    send(f"acts/{snapshot.quoted(act.id)}/approve", body, approved_text, act.id)


def approved_text(act: Act) -> str:
    """Returns what follows an approval: another one, or the executor's work."""
    if act.state == "awaiting_approval":
        return "Approved. One more person must approve it."
    return f"Approved. It waits: {act.waits_for}." if act.waits_for else "Approved. The executor begins within seconds."


def _cancel(act: Act) -> None:
    send(f"acts/{snapshot.quoted(act.id)}/cancel", {"comment": _comment(act)}, "Cancelled. Nothing was done.", act.id)


def _comment(act: Act) -> str:
    """Returns what the person wrote about this act, and no other."""
    return str(st.session_state.get(f"act-comment-{act.id}") or "")


# --- acts of an incident ---------------------------------------------------------------------------------


def draw_of_incident(incident: str, nodes: str) -> None:
    """Draws the acts of an incident, and the form of a new one, for the page of the incident."""
    open_proposed()
    answer = snapshot.fetch(parse_acts, "acts", incident=incident)
    found = answer.value
    st.html(markup.section("Acts", "plan, guards, approval"))
    parts.draw_problem(answer, "Acts unknown.")
    if found is None:
        if answer.status == 404:
            st.html(markup.notice("Acts unavailable."))
        return
    rows = [row[:3] for row in act_rows(list(found.acts), snapshot.now())]
    empty = parts.last_known("No act was proposed for this incident.", answer)
    st.html(markup.table(("Act", "State", "Requested by"), rows, empty))
    row = st.container(horizontal=True)
    if form := draw_popover(row, "Plan an act", "incident-act", path="acts"):
        with form:
            draw_form(Draft("incident-act", incident, nodes), found.modes)
    snapshot.api_url()  # asks for access, as every read does
    client = replace(snapshot.make_client(), timeout=PACKET_S)
    row.download_button(
        "RMA packet",
        lambda: client.download("rma", {"subject": incident}),
        f"rma-{incident}.zip",
        "application/zip",
        key="incident-rma",
        help="For a return to the vendor: serial numbers, firmware, errors, counters, peers and tests, as a zip",
        on_click="ignore",
    )
    if not is_open("incident-act"):
        drop_result("incident-act")
