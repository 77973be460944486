"""LeakDetection and LeakDetectors -> rows: the state of each detector, and what the BMC itself does at a leak."""

from __future__ import annotations

from agents.sources.redfish.document import Document, last_of, named
from agents.sources.redfish.rows import Found, Place, Row, facts, links

STATES = {
    "OK": 0,
    "Warning": 1,
    "Critical": 2,
    "Unavailable": 3,
    "Absent": 4,
    # what BMCs say that do not keep to the schema: LeakDetected of a GB300's, the others of OpenBMC's D-Bus
    "LeakDetected": 2,
    "Normal": 0,
    "Abnormal": 2,
    "Unknown": 3,
}
_REACTIONS = {"None": 0, "ForceOff": 1, "GracefulShutdown": 2, "ForceRestart": 3, "GracefulRestart": 4}


def detector(document: Document, place: Place) -> Found:
    """One LeakDetector."""
    values = {
        "leak.state": _state(document),
        "leak.warning_reaction": document.one_of("WarningReactionType", _REACTIONS),
        "leak.critical_reaction": document.one_of("CriticalReactionType", _REACTIONS),
        "leak.reaction_delay": document.number("ReactionDelaySeconds"),
    }
    told = facts(
        document,
        type=document.text("LeakDetectorType"),
        context=document.text("PhysicalContext"),
        location=document.inner("Location").inner("PartLocation").text("ServiceLabel"),
    )
    return Found((Row(place.entity("leak_detector"), "leak", values, place.parents, told),))


def detection(document: Document, place: Place) -> Found:
    """LeakDetection: a link to its detectors, or groups that bear the states of detectors themselves.

    A detector of a group that has a resource of its own is read there, where more is told.
    """
    rows, further = [], list(links(document, place, LeakDetectors="leak_detectors"))
    known = {link.path for link in further}
    for group in document.each("LeakDetectorGroups"):
        for number, one in enumerate(group.each("Detectors")):
            path = one.link("DataSourceUri")
            if path is not None:
                if not any(path.startswith(f"{collection}/") for collection in known):
                    further += links(one, place.at(last_of(path)), DataSourceUri="leak_detector")
                continue
            name = named(one.text("DeviceName") or str(number))
            values = {"leak.state": _state(one)}
            told = facts(document, name=one.text("DeviceName"), group=group.text("GroupName"))
            rows.append(Row(place.entity("leak_detector", name), "leak", values, place.parents, told))
    return Found(tuple(rows), tuple(further))


def _state(document: Document) -> float | None:
    """DetectorState; where there is none, that the detector is absent may stand in Status."""
    found = document.one_of("DetectorState", STATES)
    return STATES["Absent"] if found is None and document.absent else found
