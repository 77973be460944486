"""The check of `fleetpulse doctor` on Slurm's maintenance reservations, asked of the running pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.commands.checks import Check
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError
from pipeline.runtime.guides import guide

NAME = "reservations"
SHOWN = 3
"""Reservations that the line names. Chosen: it is read by a person."""


def check_reservations(config: Config) -> Check:
    """Checks that the pipeline reads Slurm's maintenance reservations, and that each of them is a window."""
    if not config.incidents.slurm_seconds:
        return Check(NAME, "info", "those of Slurm are not read: [incidents] slurm_seconds is 0")
    try:
        status, answer = client.get(config, "/api/v1/maintenance/reservations")
    except FleetpulseError:
        return Check(NAME, "info", "no pipeline answers, which reads them")
    if status != 200:
        return Check(NAME, "info", f"the pipeline does not show them (HTTP {status})")
    failures, doubts = answer["failures"], answer.get("warnings", [])
    if not failures:
        read = f"read at {answer['read'][:19]}Z" if answer["read"] else "not read yet"
        applied = f"{answer['applied']} of Slurm are maintenance windows, {read}"
        if not doubts:
            return Check(NAME, "ok", applied)
        meaning = "a window of a node that no agent and no source of topology names silences nothing"
        fix = "give agents the names that Slurm has ([agent] node), or correct the reservation"
        return Check(NAME, "warn", f"{applied}; {_list(doubts)}", meaning, fix)
    meaning = "nodes in these reservations page while people work on them; windows that are known stay as they were"
    fix = f"scontrol show reservation, on the pipeline's host and as its user; {guide('incidents.md', 'Silences')}"
    return Check(NAME, "fail", _list(failures), meaning, fix)


def _list(told: Sequence[Mapping[str, Any]]) -> str:
    """Returns the first reservations of a list with their reasons."""
    named = "; ".join(f"{one['reservation'] or 'all'}: {one['reason']}" for one in told[:SHOWN])
    return named + (f" (and {len(told) - SHOWN} more)" if len(told) > SHOWN else "")
