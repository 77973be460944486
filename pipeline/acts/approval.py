"""Who may approve a plan, and when enough people stand behind it."""

from __future__ import annotations

from dataclasses import replace

from pipeline.acts.act import VERB_KINDS, Act
from pipeline.model.records import Caller

MIN_BREAK_GLASS = 10
"""Fewest characters of the reason of a break-glass approval. Chosen: a sentence, not a keystroke."""


def check_approval(
    act: Act, who: Caller, plan: str, is_person: bool, now: int, comment: str, break_glass: bool, typed: str
) -> str:
    """Returns why an approval is refused; "" if it is accepted."""
    if not is_person:
        return "tokens never approve: a person signs in at the dashboard"
    if act.state != "awaiting_approval" or act.plan is None:
        return f"it is {act.state}; only an act that awaits approval can be approved"
    if now >= act.expires:
        return "it has expired; propose it again"
    if plan != act.plan.hash(act):
        return "the plan has changed since it was shown; read the new one"
    me = str(who), who.subject
    if any(is_same_person(me, (given.who, given.subject)) for given in act.approvals):
        return "the same person has approved it already"
    if VERB_KINDS[act.verb].hard and typed != act.targets[0].partition(":")[2]:
        return f"the name of the node was typed as {typed!r}; expected {act.targets[0].partition(':')[2]!r}"
    if break_glass:
        return _check_break_glass(act, who, comment)
    if act.plan.people > 1 and act.by_person and is_same_person(me, (act.requested_by, act.subject)):
        return "the requester cannot approve what needs two people"
    return ""


def is_same_person(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Returns whether two (name, subject) may be one person: a name can change, and two people can have one."""
    return one[0] == other[0] or (one[1] != "" and one[1] == other[1])


def drop_lapsed(act: Act, since: int) -> Act:
    """Returns the act without approvals from before a time: the first of two people holds as long as the second."""
    return replace(act, approvals=tuple(approval for approval in act.approvals if approval.time > since))


def _check_break_glass(act: Act, who: Caller, comment: str) -> str:
    if not who.may("admin"):
        return f"break-glass needs the role admin; {who} is {who.role}"
    if len(act.targets) != 1:
        return f"break-glass is for one node; this act has {len(act.targets)}"
    if len(comment.strip()) < MIN_BREAK_GLASS:
        return f"break-glass needs a reason of at least {MIN_BREAK_GLASS} characters"
    return ""


def has_enough_people(act: Act) -> bool:
    """Returns whether the approvals of the present plan are enough.

    Two people differ in name and subject: the requester counts if it is a person. A policy's approval is for soft verbs
    alone, of a plan that needs one. Approvals of an earlier plan do not count.
    """
    if act.plan is None:
        return False
    valid = [a for a in act.approvals if a.plan == act.plan.hash(act)]
    if any(a.policy for a in valid):
        return act.plan.people == 1 and not VERB_KINDS[act.verb].hard and not act.plan.failing
    if any(a.break_glass for a in valid):
        return True
    people = [(a.who, a.subject) for a in valid]
    if act.plan.people == 1:
        return bool(people)
    requester = act.requested_by, act.subject
    others = [person for person in people if not is_same_person(person, requester)]
    standing = [*people, requester] if act.by_person else people
    return any(not is_same_person(one, other) for one in others for other in standing)
