"""`fleetpulse act`: proposes acts, shows and cancels them, and follows one to its end, through the running pipeline.

Approving needs a person who signed in: tokens never approve, so `fleetpulse act approve` is refused with the address of
the page where a person can.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from pipeline.commands.output import print_message
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError, Refused

Rows = list[Mapping[str, Any]]
LIST = ("id", "state", "mode", "text", "requested_by", "incident", "reason")
GUARDS = ("guard", "now", "limit", "result")
STEPS = ("number", "time", "state", "actor", "comment")


class ActError(FleetpulseError):
    """An act ended without its effect."""

    exit_code = 1


def run_acts(
    config: Config, given: argparse.Namespace, pause: Callable[[float], None] = time.sleep
) -> tuple[Rows, Sequence[str]]:
    """Returns rows and their columns for people. Raises Refused, ActError, UsageError."""
    if given.verb in (None, "list"):
        query = urlencode({"open": "false" if given.all else "true"})
        return [flatten(act) for act in _get(config, f"/acts?{query}")["acts"]], LIST
    if given.verb == "plan":
        made = _propose(config, given, pause)
        if made["state"] == "refused":
            print_message("\n".join(describe_plan(made)))
            raise Refused(f"act {made['id']}: refused: {made['result'].get('reason', '')}")
        return _show_plan(made, given)
    if given.verb == "cancel":
        made = _post(config, f"/acts/{quote(given.id, safe='')}/cancel", {"comment": given.comment})
        return [flatten(made)], LIST
    if given.verb == "approve":
        return _approve(config, given)
    if given.verb == "run":
        return _follow(config, given, pause)
    return _show_plan(_get(config, f"/acts/{quote(given.id, safe='')}"), given)


def flatten(act: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an act as one row."""
    more = {name: act[name] for name in ("targets", "version", "waits_for")}
    return {name: act.get(name, "") for name in LIST} | more


def _propose(config: Config, given: argparse.Namespace, pause: Callable[[float], None]) -> Mapping[str, Any]:
    """Proposes an act and waits until the executor has planned it."""
    params = dict(word.partition("=")[::2] for word in given.params or ())
    body = {
        "verb": given.act,
        "targets": [name if ":" in name else f"node:{name}" for name in given.nodes],
        "reason": given.reason,
        "incident": given.incident or "",
        "params": params,
        "when": given.when,
    }
    made: Mapping[str, Any] = _post(config, "/acts", body)
    for _ in range(max(1, round(given.wait))):
        if made["state"] != "proposed":
            break
        pause(1.0)
        made = _get(config, f"/acts/{made['id']}")
    return made


def _show_plan(act: Mapping[str, Any], given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Returns the act itself for machines; its guards, or without a plan its history, for people."""
    if given.output != "table":
        return [act], ()
    print_message("\n".join(describe_plan(act)))
    if act["plan"] is None:
        return act["history"], STEPS
    rows: Rows = [
        {**guard, "guard": guard["name"], "result": "pass" if guard["passed"] else "FAIL"}
        for guard in act["plan"]["guards"]
    ]
    return rows, GUARDS


def describe_plan(act: Mapping[str, Any]) -> list[str]:
    """Returns what stands above the table of guards: act, commands, jobs, and the next step."""
    lines = [f"{act['id']}: {act['text']}, {act['state'].replace('_', ' ')}, {act['mode']}"]
    plan = act["plan"]
    if act["waits_for"]:
        lines.append(f"  waits    {act['waits_for']}")
    if plan is None:
        return [*lines, "  next     the executor plans it within seconds"]
    lines += [f"  command  {command}" for command in plan["commands"]]
    lines += [
        f"  job      {hit['job']}: {hit['nodes']} nodes, {hit['gpus']} GPUs {hit['account']}" for hit in plan["jobs"]
    ]
    if act["state"] == "awaiting_approval":
        people = "two people" if plan["people"] > 1 else "one person"
        why = f" ({'; '.join(plan['people_why'])})" if plan["people_why"] else ""
        lines.append(f"  next     {people} must approve it in the dashboard, page Acts{why}")
    return lines


def _approve(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    act = _get(config, f"/acts/{quote(given.id, safe='')}")
    plan = act["plan"]["hash"] if act["plan"] else ""  # without a plan too the API refuses it, with a row of the audit
    body = {"plan": plan, "comment": given.comment or "", "typed": given.typed or ""}
    return [flatten(_post(config, f"/acts/{quote(given.id, safe='')}/approve", body))], LIST


def _follow(config: Config, given: argparse.Namespace, pause: Callable[[float], None]) -> tuple[Rows, Sequence[str]]:
    """Waits until an approved act is over. Raises Refused if it is not approved, ActError if it has no effect."""
    act = _get(config, f"/acts/{quote(given.id, safe='')}")
    if act["state"] in ("proposed", "planned", "awaiting_approval"):
        raise Refused(f"act {given.id}: is {act['state'].replace('_', ' ')}; nothing runs before a person approves it")
    for _ in range(max(1, round(given.wait))):
        if not act["open"]:
            break
        pause(1.0)
        act = _get(config, f"/acts/{quote(given.id, safe='')}")
    if act["open"]:
        waits = f"; it waits: {act['waits_for']}" if act["waits_for"] else ""
        raise ActError(f"act {given.id}: is {act['state'].replace('_', ' ')} after {given.wait:g} s{waits}")
    if act["state"] == "refused":
        raise Refused(f"act {given.id}: refused: {act['result'].get('reason', '')}")
    if act["state"] == "expired":
        raise Refused(f"act {given.id}: expired before it began; plan it again")
    if act["state"] not in ("verified", "executed"):  # a dry run ends executed
        raise ActError(f"act {given.id}: {act['state'].replace('_', ' ')}: {act['result'].get('reason', '')}")
    return act["history"], STEPS


def _get(config: Config, path: str) -> Any:
    status, answer = client.get(config, f"/api/v1{path}")
    if status != 200:
        raise client.make_error(status, answer, f"{client.base_url(config)}/api/v1{path}")
    return answer


def _post(config: Config, path: str, body: Mapping[str, Any]) -> Any:
    return client.post(config, f"/api/v1{path}", body)
