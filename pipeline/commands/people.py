"""`fleetpulse incidents`, `ack`, `assign`, `comment`, `resolve`, `reopen`, `merge`, `split`, `feedback`, `silences`,
`maintenance`, `share`, `handover`, `audit` and `token`: what people do, through the running pipeline.

`token` changes the file with the tokens beside the store, on the host of the pipeline; it needs no running pipeline.
"""

from __future__ import annotations

import argparse
import getpass
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from pipeline.api import tokens
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.incidents.handover import format_handover
from pipeline.model.entity_names import entity_name, short_duration
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, from_iso, iso
from pipeline.model.regular_files import read_regular_text
from pipeline.model.silence_end import describe_end
from pipeline.runtime.guides import guide

Rows = list[Mapping[str, Any]]
WIDTH = 120
"""Columns of a table for people. Long cells have several lines; titles in lists of incidents are cut."""
INCIDENTS = ("id", "severity", "state", "opened", "who", "cause", "summary")
SHOWN_INCIDENTS = ("id", "severity", "state", "opened", "who", "summary")
"""Columns for people: the title names the cause, and needs the width."""
WIDEST_WHO = 16
"""Characters of a person in that list; an address is often longer. Chosen: as wide as an id."""
LATE_S = 120.0
"""Age of the newest evaluated telemetry (s) that a list of incidents mentions. Chosen: a frame waits at most 40 s."""
SILENCES = ("id", "kind", "state", "until", "author", "text", "reason")
AUDIT = ("number", "time", "actor", "role", "origin", "outcome", "action", "target", "reason")
SHARED = ("attribute", "value", "inside", "outside", "p_corrected", "separates")
TOKENS = ("id", "owner", "role", "on_behalf_of", "created", "created_by", "expires", "state")
HISTORY = ("number", "time", "kind", "actor", "comment")
MOST_MEMBERS = 100
"""Members that `incidents show` names. Chosen: 20 lines; a larger incident is split by a program."""
_ACTS = {"ack": "acknowledge", "split": "split"}


def run_incidents(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Returns incidents (unresolved, of a state, or all), or one with its history, and the columns for people."""
    if given.verb == "show":
        found = _get(config, f"/incidents/{quote(given.id, safe='')}")
        if given.output != "table":
            return [found], ()
        facts = _fact_rows(found, _list_silences(config, found["silenced_by"]))
        return [*facts, *found["history"], *_impact_rows(found)], HISTORY
    state = f"?state={given.state}" if given.state else ""
    answer = _get(config, f"/incidents{state}")
    rows = answer["incidents"]
    if given.output == "table" and (late := describe_lateness(answer, time.time_ns() // 1000)):
        sys.stderr.write(f"fleetpulse: {late}\n")
    kept = rows if given.state or given.all else [row for row in rows if row["resolved"] is None]
    return [_with_person(row) for row in kept], INCIDENTS


def describe_lateness(answer: Mapping[str, Any], now: int) -> str:
    """Returns why incidents may be missing from a list: nothing is evaluated, or only old telemetry; empty if not."""
    if answer["unready"]:
        return f"incidents may be missing: {'; '.join(answer['unready'])}"
    if answer["judged"] is None:
        return "incidents may be missing: no telemetry was evaluated yet"
    late = (now - from_iso(answer["judged"])) / SECOND
    if late <= LATE_S and not answer["stalled"]:
        return ""
    return (
        f"incidents may be missing: telemetry is evaluated until {answer['judged'][:19]}Z, {short_duration(late)} ago"
    )


def _list_silences(config: Config, ids: Sequence[str]) -> list[str]:
    """Returns a text for each silence of an incident: id, end, author and reason."""
    known = {s["id"]: s for s in _get(config, "/silences?active=true")["silences"]} if ids else {}
    found = [(id_, known.get(id_)) for id_ in ids]
    return [id_ if s is None else f"{id_} until {describe_end(s)}Z, {s['author']}: {s['reason']}" for id_, s in found]


def _fact_rows(incident: Mapping[str, Any], silences: Sequence[str]) -> Rows:
    """Returns state, owner and whatever holds back the alerts of an incident, as rows before the history, at the time
    of the onset. Members have the names that `split` takes."""
    sure, members = incident["confidence"], incident["members"]
    more = f" and {len(members) - MOST_MEMBERS:,} more (--output json)" if len(members) > MOST_MEMBERS else ""
    facts = {
        "title": incident["summary"],
        "cause": entity_name(incident["cause"]) + ("" if sure is None else f", confidence {sure:.2f}"),
        "state": _describe_state(incident),
        "severity": incident["severity"],
        "owner": incident["assignee"] or incident["acknowledged_by"] or "nobody",
        "members": f"{len(members):,}: {' '.join(members[:MOST_MEMBERS])}{more}",
        "silences": "; ".join(silences),
        "inhibited": _describe_inhibition(incident),
        "advice": incident["advice"] or "",
        "runbook": incident["runbook_url"] or "",
    }
    row = {"number": "", "time": incident["onset"], "actor": ""}
    return [{**row, "kind": kind, "comment": text} for kind, text in facts.items() if text]


def _describe_state(incident: Mapping[str, Any]) -> str:
    """Returns the state with who acknowledged it and until when, or when it was resolved."""
    if incident["resolved"]:
        return f"resolved at {_brief(incident['resolved'])}"
    if incident["state"] != "acknowledged":
        return str(incident["state"])
    until = f" until {_brief(incident['acknowledged_until'])}" if incident["acknowledged_until"] else ""
    return f"acknowledged by {incident['acknowledged_by']}{until}"


def _describe_inhibition(incident: Mapping[str, Any]) -> str:
    """Returns which incidents hold back its alerts: the storm of which it is a part, or the source of a rule."""
    parts = [f"part of {', '.join(incident['inhibited_by'])}"] if incident["inhibited_by"] else []
    parts += [f"by {incident['inhibitor']} ({incident['inhibit_rule']})"] if incident["inhibitor"] else []
    return "; ".join(parts)


def _brief(time: str) -> str:
    """Returns a time of the API to the minute."""
    return f"{time[:16].replace('T', ' ')}Z"


def _impact_rows(incident: Mapping[str, Any]) -> Rows:
    """Returns who suffers from an incident now, and the facts of each job, as the last rows of its history."""
    impact = incident["impact"]
    if impact is None or not impact["text"]:
        return []
    row = {"number": "", "time": impact["as_of"], "kind": "impact", "actor": "", "comment": impact["text"]}
    jobs = [{**row, "comment": f"{entity_name(job['job'])}: {job['basis']}"} for job in impact["jobs"]]
    return [row, *jobs]


def run_act(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Does what a person asks for to each incident, and returns them."""
    body: dict[str, Any] = {"comment": given.comment or ""}
    ids = [given.id] if isinstance(given.id, str) else given.id
    if given.command == "ack":
        body["hours"] = given.hours
    elif given.command == "assign":
        if not given.to:
            raise UsageError("assign: PERSON: found an empty text; expected a name, or '-' to remove the assignee")
        body["to"] = "" if given.to == "-" else given.to
    elif given.command == "resolve":
        body["not_a_fault"] = given.not_a_fault
    elif given.command == "merge":
        body["incidents"] = given.others
    elif given.command == "split":
        body["entities"] = given.entities
    elif given.command == "feedback":
        body["verdict"] = given.verdict
    verb = _ACTS.get(given.command, given.command)
    made = [_send(config, f"/incidents/{quote(id_, safe='')}/{verb}", body, given.expected) for id_ in ids]
    return [_with_person(row) for row in made], INCIDENTS


def run_silences(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Lists, adds, previews, edits, extends or expires silences; and maintenance windows."""
    where, verb = f"/{given.command}", given.verb or "list"
    if verb == "list":
        return _get(config, f"{where}?active={'false' if given.all else 'true'}")["silences"], SILENCES
    if verb == "preview":
        found = _send(config, f"{where}/preview", {"matchers": given.matchers})["incidents"]
        return [_with_person(row) for row in found], INCIDENTS
    if verb == "add":
        span = {"seconds": given.hours * 3600, "reason": given.reason, "starts": given.starts}
        scopes = () if given.command == "silences" else given.scopes
        what = {"scopes": scopes} if scopes else {"matchers": given.matchers}
        made = _send(config, where, {**what, **span})
        if made.get("warning"):
            sys.stderr.write(f"fleetpulse: warning: {made['warning']}\n")
        return [made], SILENCES
    path = f"/silences/{quote(given.id, safe='')}"
    if verb in ("expire", "end"):
        return [_send(config, f"{path}/expire", {}, given.expected)], SILENCES
    body: dict[str, Any] = {}
    if verb == "edit":
        body = {
            "matchers": given.matchers or None,
            "ends": given.ends,
            "reason": given.reason,
        }
    else:
        known = _get(config, f"{where}?active=true")["silences"]
        ends = next((s["ends"] for s in known if s["id"] == given.id), None)
        if ends is None:
            raise UsageError(f"{given.command} {given.id}: no such one that has not ended")
        body["ends"] = iso(from_iso(ends) + int(given.hours * 3600 * SECOND))
    return [client.send(config, "PUT", f"/api/v1{path}", body, given.expected)], SILENCES


def run_handover(config: Config, given: argparse.Namespace) -> tuple[Rows, str]:
    """Returns the handover as one row, and as text for people."""
    begun = given.since or iso(time.time_ns() // 1000 - int(given.hours * 3600 * SECOND))
    found = _get(config, f"/handover?{urlencode({'since': begun})}")
    return [found], format_handover(found, WIDTH)


def run_audit(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str], int | None]:
    """Returns rows of the audit, newest first, the columns, and the first row that was changed, if there is one."""
    chosen = {"since": given.since, "actor": given.actor, "target": given.target, "limit": given.limit}
    found = _get(config, f"/audit?{urlencode({name: value for name, value in chosen.items() if value is not None})}")
    return found["audit"], AUDIT, found["broken"]


MARKS = {
    "changed": "row {row} is another one now: the audit was written again",
    "missing": "the audit ends before row {row}: the newest rows were removed",
    "older": "row {row} is older than the rows that are kept, from {oldest}: keep a newer mark",
}
"""What became of the row of a mark, for people."""


def verify_audit(config: Config, given: argparse.Namespace) -> tuple[Mapping[str, Any], str, bool]:
    """Returns the findings about the audit's chain and a mark, in words too, and whether all of it is whole."""
    mark = given.mark or ""
    found = _get(config, f"/audit?{urlencode({'limit': 1, **({'mark': mark} if mark else {})})}")
    broken, newest = found["broken"], found["newest"]
    said = {name: found[name] for name in ("broken", "oldest", "newest", "mark")}
    if broken is not None:
        return said, f"row {broken} of the audit was changed, or the row before it is missing", False
    if found["mark"] in MARKS:
        return said, MARKS[found["mark"]].format(row=mark.partition(":")[0], oldest=found["oldest"]), False
    if not newest:
        return said, "the audit is empty", True
    rows = f"rows {found['oldest']:,} to {int(newest.partition(':')[0]):,}"
    held = f"; row {mark.partition(':')[0]} is as it was marked" if mark else ""
    kept = f"mark {newest}\nkeep the mark elsewhere: with --mark it finds newest rows that are removed later"
    return said, f"the hash chain of the audit is whole, {rows}{held}\n{kept}", True


def run_token(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str], str]:
    """Creates, lists or revokes tokens. Returns rows, columns, and the text of a new token, which is shown once."""
    path, now, text = tokens.find_role_file(config.store.path), time.time_ns() // 1000, ""
    if given.verb == "create":
        days, behalf = given.days, given.on_behalf_of
        executor = given.executor
        made, text = tokens.create_role_token(
            path, given.owner, given.role, days, getpass.getuser(), now, behalf, executor
        )
        found = [made]
    elif given.verb == "revoke":
        elsewhere = explain_file_token(config, given.id)
        found = [tokens.revoke_role_token(path, given.id, getpass.getuser(), now, elsewhere)]
    else:
        found = tokens.load_role_tokens(path)
    rows: Rows = [
        {
            **{
                name: getattr(token, name)
                for name in ("id", "owner", "role", "created_by", "revoked_by", "on_behalf_of")
            },
            "created": iso(token.created),
            "expires": None if token.expires is None else iso(token.expires),
            "state": "revoked" if token.revoked is not None else "valid" if token.is_valid(now) else "expired",
        }
        for token in found
    ]
    return rows, TOKENS, text


def explain_file_token(config: Config, name: str) -> str:
    """Returns where the token of a user of [api] token_file is ended; empty if it has none of that name, or this user
    may not read it."""
    path = config.api.token_file
    if path is None:
        return ""
    try:
        known = any(line.partition(":")[0].strip() == name for line in read_regular_text(path).splitlines())
    except (OSError, UnicodeDecodeError):
        return ""
    return (
        f"is a line of [api] token_file = '{path}', not a token of fleetpulse token; replace or remove that line, then "
        "reload the pipeline (of a unit: systemctl restart fleetpulse-pipeline fleetpulse-dashboard, which have copies)"
        if known
        else ""
    )


def explain_token(config: Config, made: Mapping[str, Any]) -> list[str]:
    """Returns what a person needs to know of a new token; the first one closes an API that asked for none."""
    until = "never expires" if made["expires"] is None else f"expires {made['expires'][:10]}"
    lines = [f"{made['role']} token {made['id']} of {made['owner']}, {until}; shown once: keep it in a private file"]
    if config.api.token_file is None and len(tokens.load_role_tokens(tokens.find_role_file(config.store.path))) == 1:
        lines.append(f"from now on the API answers nobody without a token; here: export {client.TOKEN_VARIABLE}=...")
        if config.dashboard.token_file is None:
            lines.append(f"the dashboard needs one too: [dashboard] token_file ({guide('dashboard.md')})")
    return lines


def run_share(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Returns what nodes have in common that others have not; for people, only significant values if there are some."""
    asked = {"incident": given.incident, "within": given.within}
    body = {"entities": given.entities, **{name: value for name, value in asked.items() if value}}
    found = _send(config, "/share", body)
    proven = [row for row in found["shared"] if row["separates"]]
    about = f"{found['selected']:,} nodes against {found['others']:,} others, {found['compared']:,} values compared"
    nothing = "" if proven else ": nothing separates them; the nearest values are within chance"
    for line in (about + nothing, *(f"{entity}: no node of it is known" for entity in found["unknown"])):
        sys.stderr.write(f"fleetpulse: {line}\n")
    rows = proven if proven and given.output == "table" else found["shared"]
    return ([{**r, "p_corrected": float(f"{r['p_corrected']:.2g}")} for r in rows] if rows else []), SHARED


RUN = {
    "incidents": run_incidents,
    "silences": run_silences,
    "maintenance": run_silences,
    "share": run_share,
}
"""Command -> what it runs; all others are acts on incidents."""


def shorten_times(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Rows:
    """Returns rows for people: times to the second, without the letters of ISO 8601."""
    times = {"opened", "until", "time", "created", "expires", "delivered"}
    rows = [{**r, "until": describe_end(r, 19)} if r.get("kind") == "maintenance" and "ends" in r else r for r in rows]
    return [{c: _to_second(str(r[c])) if c in times and r.get(c) else r.get(c) for c in columns} for r in rows]


def _to_second(time: str) -> str:
    return time if " " in time else time[:19].replace("T", " ")  # the end of a window is text already


def _with_person(incident: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an incident with its owner: the assignee, else who acknowledged it."""
    return {**incident, "who": incident["assignee"] or incident["acknowledged_by"]}


def _get(config: Config, path: str) -> Any:
    status, answer = client.get(config, f"/api/v1{path}", timeout=30.0)
    if status != 200:
        raise client.make_error(status, answer, f"{client.base_url(config)}/api/v1{path}")
    return answer


def _send(config: Config, path: str, body: Mapping[str, Any], version: int | None = None) -> Any:
    return client.send(config, "POST", f"/api/v1{path}", body, version)
