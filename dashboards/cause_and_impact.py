"""Cause, impact and recommended action of an incident: rows and texts of the incident page, with links."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from urllib.parse import parse_qs, urlsplit

from dashboards import routes
from dashboards.answers import IncidentDetail
from dashboards.detail_answers import Explained, Impact, ImpactedJob
from dashboards.links import Link, Text, as_markup, detector_link, entity_link, incident_link, open_tag
from dashboards.people_answers import Silence
from dashboards.words import age, amount, clock, joined, percent, plain, quantity, recommended_action
from pipeline.model.entity_names import entity_name
from pipeline.model.job_effect import describe_effect, read_doubt, split_doubt
from pipeline.model.loss_owner import find_owner
from pipeline.model.records import SECOND, Incident

MOST_UNBROKEN = 24
"""Characters of a job's id that stay in one line; a longer one would not fit into its column. Chosen."""
MAX_ALTERNATIVES = 3
"""Other causes that are listed; the rest is less likely. Chosen."""


def cause_rows(detail: IncidentDetail) -> list[tuple[str, Text]]:
    """Returns label and text: suspected cause, confidence, evidence, and other causes that were weighed."""
    incident, why = detail.incident, detail.explanation
    rows: list[tuple[str, Text]] = [("Suspected cause", entity_link(incident.cause))]
    confidence = incident.confidence if why is None or why.probability is None else why.probability
    rows.append(("Confidence", "not computed" if confidence is None else percent(confidence)))
    if incident.detector:
        rows.append(("Detector", detector_link(incident.detector)))
    if why is None:
        return rows
    if why.evidence:
        rows.append(("Evidence", plain(why.evidence)))
    for cause, probability in [pair for pair in why.alternatives if pair[1] > 0][:MAX_ALTERNATIVES]:
        name = entity_link(cause) if cause else "no shared cause"
        label = f"Alternative, {percent(probability)}"
        rows.append((label, name))
    return rows


def explained_rows(found: Sequence[Explained], now: int) -> list[tuple[Text, ...]]:
    """Returns (onset, entity, how the cause shows there, path) of explained findings, as they are ordered."""
    return [
        (clock(e.onset, now), entity_link(e.entity), e.step, " → ".join(entity_name(part) for part in e.path))
        for e in found
    ]


def impact_lines(impact: Impact) -> list[str]:
    """Returns reached devices and the loss: `8 GPUs on 1 node, 8 ranks`, `12.5 GPU-hours lost, 4 per hour`."""
    reached = f"{amount(impact.gpus, 'GPU', 'GPUs')} on {amount(impact.nodes, 'node', 'nodes')}"
    lines = [f"{reached}, {amount(impact.ranks, 'rank', 'ranks')}"]
    if impact.lost_gpu_hours or impact.lost_gpu_hours_per_hour:
        loss = f"{quantity(impact.lost_gpu_hours)} GPU-hours lost, {quantity(impact.lost_gpu_hours_per_hour)} per hour"
        if impact.cost is not None:
            total, hourly, currency = impact.cost
            loss += f" ({quantity(total)} {currency}, {quantity(hourly)} {currency} per hour)"
    elif any(split_doubt(job.basis)[0] for job in impact.jobs):
        loss = "no GPU-hours lost to slowness so far"  # wrong results may cost all since then
    else:
        loss = "no GPU-hours lost so far"
    if any(job.state == "lost" and split_doubt(job.basis)[1].startswith("ended ") for job in impact.jobs):
        loss += ", those from the end of a lost job on are added when it runs again"
    owners = {owner: None for j in impact.jobs if (owner := find_owner(j.basis))}
    if owners and not impact.lost_gpu_hours_per_hour:
        loss += f" here: the loss of a job is counted once, now in {joined(list(owners))}"
    return [*lines, loss]


def unlisted_text(impact: Impact) -> str:
    """Returns why no job, or not every job, is shown: that of some nodes no inventory is read yet; empty if of all."""
    if not impact.unlisted:
        return ""
    nodes = "these nodes" if impact.unlisted >= impact.nodes else amount(impact.unlisted, "node", "nodes")
    return f"Jobs of {nodes} are not known: no inventory with jobs has arrived."


def job_rows(impact: Impact, now: int) -> list[tuple[Text, ...]]:
    """Returns (job, effect, loss) of the jobs that are hit, as the API orders them."""
    return [(entity_link(j.job, _job_name(j)), job_effect(j, now), _job_loss(j)) for j in impact.jobs]


def job_markup(job: ImpactedJob) -> str:
    """Returns the link to a job as markup: its id stays in one line, also at a hyphen; its name may break."""
    link, identity = entity_link(job.job, _job_name(job)), entity_name(job.job)
    if len(identity) > MOST_UNBROKEN:
        return as_markup(link)
    rest = escape(link.text.removeprefix(identity))
    return f'{open_tag(link)}<span class="fp-one-line">{escape(identity)}</span>{rest}</a>'


def _job_loss(job: ImpactedJob) -> Text:
    """Returns the loss that this incident counts; if another one counts it now, as a link there."""
    lost, owner = f"{quantity(job.lost_gpu_hours)} GPU-h", find_owner(job.basis)
    return Link(f"{lost}; now in {owner}", routes.href("incident", id=owner)) if owner else lost


def _job_name(job: ImpactedJob) -> str:
    name = entity_name(job.job)
    return f"{name} {job.name}".strip() if job.name not in name else name


def job_effect(job: ImpactedJob, now: int) -> str:
    """Returns `31 % slower than before the onset: step time 1.92 s, was 1.47 s`, or what else is known."""
    return effect_text(job.state, job.slowdown, job.basis, now)


def effect_text(state: str, slowdown: float | None, basis: str, now: int) -> str:
    """Returns `describe_effect` with the time of a doubt as the page writes times."""
    doubt, text = split_doubt(basis)[0], describe_effect(state, slowdown, basis)
    since = read_doubt(doubt)
    return text.replace(doubt, f"{doubt.rpartition(' ')[0]} {clock(since, now)}", 1) if since else text


def action_text(detail: IncidentDetail, now: int) -> str:
    """Returns the advice of the site or of Fleetpulse, of a resolved incident after since when it is; of a merged one,
    whose fault may go on in the other, only where the advice is."""
    incident = detail.incident
    if is_merged(incident):
        return f"Merged into {incident.life.merged_into}, whose advice holds."
    advice = plain(detail.advice) if detail.advice else recommended_action(incident.detector, incident.cause)
    if incident.resolved is None:
        return advice
    return f"Resolved since {clock(incident.resolved, now)}. The advice while it was open: “{advice}”"


def is_merged(incident: Incident) -> bool:
    """Returns whether an incident ended by a merge: it is resolved, its fault is not."""
    return bool(incident.life.merged_into) and incident.resolved is not None


def runbook_link(detail: IncidentDetail) -> Text:
    """Returns the link to the site's runbook; without one to the detector, where its blind spots and method are; empty
    without both."""
    own = read_detector_page(detail.runbook_url)
    if own:
        return Link("About this detector", routes.href("detectors", detector=own))
    return Link("Runbook", detail.runbook_url) if detail.runbook_url else ""


def read_detector_page(url: str) -> str:
    """Returns the detector of an address of the page of detectors, which the API gives in place of a runbook."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    return query["detector"][0] if parts.path.endswith("/detectors") and query.keys() == {"detector"} else ""


def life_notices(incident: Incident, now: int, silences: Sequence[Silence] = ()) -> list[tuple[str, list[Text]]]:
    """Returns (heading, texts) about acts of people and the clock: the owner, until when, what holds it back.

    silences: those that are known; of another one the id is shown.
    """
    names = {s.id: f"{s.author} until {clock(s.until, now)}: {s.reason}" for s in silences}
    life, found = incident.life, list[tuple[str, list[Text]]]()
    if life.merged_into:
        found.append(("Merged into", [incident_link(life.merged_into)]))
    if life.inhibited_by:
        found.append(("No separate alert: part of", [incident_link(i) for i in life.inhibited_by]))
    if life.inhibitor and incident.resolved is None:
        found.append((f"Inhibited ({life.inhibit_rule}) by", [incident_link(life.inhibitor)]))
    if life.silenced_by and incident.state != "resolved":
        found.append(("Silenced by", [Link(names.get(s, s), routes.href("silences", id=s)) for s in life.silenced_by]))
    return found


def owner_text(incident: Incident, now: int) -> str:
    """Returns who works on it: `acknowledged by ann until 14:00:00Z`, `assigned to bob`; empty if there is no one."""
    life, texts = incident.life, []
    if life.acknowledged_by and incident.resolved is None:
        until = life.acknowledged_until
        texts.append(
            f"acknowledged by {life.acknowledged_by}" + ("" if until is None else f" until {clock(until, now)}")
        )
    if life.assignee:
        texts.append(f"assigned to {life.assignee}")
    if life.feedback:
        texts.append(f"feedback: {life.feedback}")
    return ", ".join(texts)


def storm_rows(detail: IncidentDetail) -> list[Text]:
    """Returns links to the incidents that a storm lists."""
    return [incident_link(i) for i in detail.incident.life.represents]


def storm_size(detail: IncidentDetail) -> str:
    """Returns how many incidents a storm represents; its list is bounded."""
    listed = len(detail.incident.life.represents)
    number = max(detail.incident.life.represented, listed)
    return f"represents {amount(number, 'incident', 'incidents')}{f', lists {listed:,}' if listed < number else ''}"


def similar_rows(detail: IncidentDetail, now: int) -> list[tuple[Text, ...]]:
    """Returns (onset, incident, duration, why it is similar, what people wrote) of past incidents."""
    return [
        (
            clock(s.onset, now),
            incident_link(s.id, plain(s.summary)),
            "" if s.resolved is None else age((s.resolved - s.onset) / SECOND),
            s.why,
            "; ".join(filter(None, (s.note, f"feedback: {s.feedback}" if s.feedback else ""))),
        )
        for s in detail.similar
    ]
