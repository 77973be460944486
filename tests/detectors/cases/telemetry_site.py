"""A pipeline without data from any agent of a site."""

from __future__ import annotations

from detectors.telemetry.telemetry_site import TelemetrySite
from pipeline.model.records import SECOND, Event, iso
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, Case


def instant(tick, broken, rng):
    if not broken or tick != 60:
        return {}, []
    time = START + tick * 10 * SECOND
    data = {"agents": 16, "since": iso(time - 45 * SECOND), "shares": "leaf:l1", "nodes": ["n1", "n2"]}
    return {}, [Event(time, "site:here", "site_silent", data)]


CASE = Case(
    detector=TelemetrySite,
    names={},
    topology=Topology,
    instant=instant,
    guilty=frozenset({"site:here"}),
    ticks=70,  # it is reported once, and holds until the event `site_heard` clears it
    exact="the pipeline counts arrivals by its own clock",
)
