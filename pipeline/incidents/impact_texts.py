"""The impact of an incident in words: one line for pages, and affected jobs for a title."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.incidents.job_loss import SUFFERS
from pipeline.model.entity_names import KINDS, entity_name
from pipeline.model.job_effect import describe_effect, split_doubt
from pipeline.model.loss_owner import drop_owner, find_owner

UNLISTED = "nodes_without_job_list"
"""Field of the impact: reached nodes of which no inventory with their jobs has been read."""


def describe_impact(impact: Mapping[str, Any]) -> str:
    """Returns an impact as one line: `job 81 (llama) hangs, 512 GPUs; 4.1 GPU-h lost, 512 GPU-h/h`."""
    suffering = [j for j in impact["jobs"] if j["state"] in SUFFERS]
    shown = [_describe_job(j) for j in suffering[:3]]
    shown += [f"{len(suffering) - 3} more jobs suffer"] if len(suffering) > 3 else []
    doubtful = [j for j in impact["jobs"] if j not in suffering and split_doubt(j["basis"])[0]]
    shown += [f"{entity_name(j['job'])}: {split_doubt(j['basis'])[0]}" for j in doubtful[:3]]
    shown += [f"results of {_count(len(doubtful) - 3, 'job')} more in doubt"] if len(doubtful) > 3 else []
    others = impact["job_count"] - len(suffering) - len(doubtful)
    if not suffering and not doubtful and others:
        names = entity_name(impact["jobs"][0]["job"]) if others == 1 else f"{others} jobs"
        ranks = sum(j["ranks"] for j in impact["jobs"])
        shown.append(f"reaches {_count(ranks, 'rank')} of {names}, {_describe_calm(impact['jobs'])}")
    if not shown and impact["gpus"]:
        shown.append(f"{_count(impact['gpus'], 'gpu')} on {_count(impact['nodes'], 'node')}, {describe_no_job(impact)}")
    elif shown and impact[UNLISTED]:
        shown.append(f"jobs of {_count(impact[UNLISTED], 'node')} not known")
    lost, rate = impact["lost_gpu_hours"], impact["lost_gpu_hours_per_hour"]
    if lost or rate:
        cost = impact["cost"]
        money = f" ({cost['amount']:,.0f} {cost['currency']})" if cost else ""
        shown.append(f"{lost:,.1f} GPU-h lost{money}, {rate:,.1f} GPU-h per hour")
    if not rate and (owners := {owner: None for j in impact["jobs"] if (owner := find_owner(j["basis"]))}):
        shown.append(f"{'now ' if lost else ''}counted in {' and '.join(owners)}")
    return "; ".join(shown)


def describe_no_job(impact: Mapping[str, Any]) -> str:
    """Returns what is known about the jobs of an impact without one: `no job` only if the inventories say so."""
    unlisted = impact[UNLISTED]
    if not unlisted:
        return "no job"
    return "jobs not known" if unlisted >= impact["nodes"] else f"jobs of {_count(unlisted, 'node')} not known"


def _describe_calm(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the impact on jobs of which none suffers."""
    states = [job["state"] for job in jobs]
    if "unknown" in states:
        return "slowdown not measured"
    if "ended" not in states:
        if len(jobs) > 1:
            return "none slower than before the onset"
        return describe_effect(states[0], jobs[0]["slowdown"], jobs[0]["basis"])
    return drop_owner(str(jobs[0]["basis"])) if len(jobs) == 1 else f"{states.count('ended')} ended"


def name_affected(impact: Mapping[str, Any]) -> str:
    """Returns affected jobs, for a title: `job 81 hangs (512 GPUs)`, `rank 79 of job 81 on it`, `jobs not known`; empty
    only if there is none."""
    suffering = [j for j in impact["jobs"] if j["state"] in SUFFERS]
    if len(suffering) > 1:
        return f"{len(suffering)} jobs suffer ({_count(sum(j['gpus'] for j in suffering), 'gpu')})"
    if suffering:
        job = suffering[0]
        state = f"{100 * job['slowdown']:.0f} % slower" if job["state"] == "slow" else _WORDS[job["state"]]
        return f"{entity_name(job['job'])} {state} ({_count(job['gpus'], 'gpu')})"
    if not impact["job_count"]:
        return describe_no_job(impact) if impact["gpus"] and impact[UNLISTED] else ""
    job, count = impact["jobs"][0], impact["job_count"]
    if count > 1:
        ended = sum(j["state"] == "ended" for j in impact["jobs"])
        on_it = [f"{_count(count - ended, 'job')} on it"] if ended < count else []
        return ", ".join(on_it + ([f"{ended} ended" if on_it else f"{ended} jobs ended"] if ended else []))
    if job["state"] == "ended":
        return f"{entity_name(job['job'])} ended"
    ranks = job["rank_names"]
    return f"{entity_name(ranks[0] if len(ranks) == 1 and job['ranks'] == 1 else job['job'])} on it"


def _describe_job(job: Mapping[str, Any]) -> str:
    name = entity_name(job["job"]) + (f" ({job['name']})" if job["name"] else "")
    state = f"{100 * job['slowdown']:.0f} % slower" if job["state"] == "slow" else _WORDS[job["state"]]
    ranks = job["rank_names"]
    rank = f", {entity_name(ranks[0]).partition(' of ')[0]}" if len(ranks) == 1 and job["ranks"] == 1 else ""
    doubt = f", {found}" if (found := split_doubt(job["basis"])[0]) else ""
    return f"{name} {state}{rank}, {_count(job['gpus'], 'gpu')}{doubt}"


_WORDS = {"hanging": "hangs", "lost": "is lost"}


def _count(number: int, kind: str) -> str:
    return f"{number:,} {KINDS[kind][number != 1]}"
