"""Names of entities for people, and titles of findings: `gpu:n042.3` is "GPU 3 of n042"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

TITLE_LENGTH = 80
"""Most characters of a title: a pager shows no more."""
KINDS: Mapping[str, tuple[str, str]] = {
    # kind -> (one, many)
    "gpu": ("GPU", "GPUs"),
    "cpu": ("core", "cores"),
    "port": ("port", "ports"),
    "nic": ("NIC", "NICs"),
    "node": ("node", "nodes"),
    "rack": ("rack", "racks"),
    "row": ("row", "rows"),
    "hall": ("hall", "halls"),
    "facility": ("facility", "facilities"),
    "pod": ("pod", "pods"),
    "cdu": ("CDU", "CDUs"),
    "loop": ("loop", "loops"),
    "connector": ("connector", "connectors"),
    "pump": ("pump", "pumps"),
    "reservoir": ("reservoir", "reservoirs"),
    "filter": ("filter", "filters"),
    "pdu": ("PDU", "PDUs"),
    "shelf": ("power shelf", "power shelves"),
    "chassis": ("chassis", "chassis"),
    "circuit": ("circuit", "circuits"),
    "outlet": ("outlet", "outlets"),
    "output": ("output", "outputs"),
    "battery": ("battery", "batteries"),
    "leaf": ("leaf switch", "leaf switches"),
    "spine": ("spine switch", "spine switches"),
    "switch": ("switch", "switches"),
    "rail": ("rail", "rails"),
    "job": ("job", "jobs"),
    "rank": ("rank", "ranks"),
    "stage": ("stage", "stages"),
    "version": ("version", "versions"),
    "change": ("recent change to", "recent changes"),
    "site": ("site", "sites"),
    "fabric": ("fabric", "fabrics"),
    "nvlink": ("NVLink", "NVLinks"),
    "neuroncore": ("NeuronCore", "NeuronCores"),
    "sensor": ("sensor", "sensors"),
    "psu": ("power supply", "power supplies"),
    "leak_detector": ("leak detector", "leak detectors"),
    "bmc": ("BMC", "BMCs"),
    "dimm": ("memory module", "memory modules"),
    "disk": ("disk", "disks"),
    "filesystem": ("file system", "file systems"),
    "service": ("service", "services"),
    "agent": ("agent", "agents"),
    "collector": ("collector", "collectors"),
    "exporter": ("exporter", "exporters"),
    "detector": ("detector", "detectors"),
    "objective": ("objective", "objectives"),
}
_NAMES_WORK = re.compile(r"\b(jobs?|ranks?|stages?)\b", re.IGNORECASE)
_OF_A_JOB = ("rank", "stage")
_VERSIONS = ("version", "change")
"""Kinds whose names are `attribute=version`, which has dots too."""


def entity_name(entity: str) -> str:
    """`gpu:n042.3` -> `GPU 3 of n042`, `site:all` -> `whole site`; unchanged if its kind is not in KINDS."""
    kind, _, name = entity.partition(":")
    owner, dot, part = name.partition(".")
    if kind not in KINDS or not name:
        return entity
    word = KINDS[kind][0]
    if kind in _VERSIONS:
        return f"{word} {name.replace('=', ' ', 1)}"
    if name == "all":
        return f"whole {word}"
    if dot and kind in _OF_A_JOB:
        return f"{word} {part} of job {owner}"
    return f"{word} {part} of {owner}" if dot else f"{word} {name}"


def parse_entity_name(text: str) -> tuple[str, ...]:
    """Returns the entities that may have this name, in any case, case-folded: the inverse of `entity_name`.

    Several, as names may have dots, `=` and ` of ` themselves: `GPU 3 of n042` is `gpu:n042.3` or `gpu:3 of n042`.
    """
    folded = text.casefold()
    kind, rest = split_kind(folded)
    written = (folded,) if ":" in folded else ()
    if not kind:
        whole = next((k for k, (word, _) in KINDS.items() if folded == f"whole {word.casefold()}"), "")
        return (f"{whole}:all", *written) if whole else written
    found = [rest]
    if kind in _VERSIONS:
        found += [f"{rest[: at.start()]}={rest[at.end() :]}" for at in re.finditer(" ", rest)]
    else:
        found += [f"{owner}.{part}" for part, owner in _split_owner(kind, rest) if "." not in owner]
    return (*(f"{kind}:{name}" for name in found if name), *written)


def split_kind(text: str) -> tuple[str, str]:
    """`GPU 3 of n042` -> (`gpu`, `3 of n042`), `leaf switch l7` -> (`leaf`, `l7`), case-folded; (``, the text) if it
    does not begin with the word of a kind."""
    folded = text.casefold()
    for kind, (word, _) in KINDS.items():
        if folded.startswith(f"{word.casefold()} "):
            return kind, folded[len(word) + 1 :]
    return "", folded


def split_part(text: str) -> tuple[str, str, str]:
    """`GPU 3 of n042` -> (`gpu`, `3`, `n042`), `node n0` -> (`node`, ``, `n0`), case-folded: kind, part and owner of a
    name that may not be complete."""
    kind, rest = split_kind(text)
    part, owner = next(_split_owner(kind, rest), ("", rest)) if kind else ("", rest)
    return kind, part, owner


def _split_owner(kind: str, rest: str) -> Iterator[tuple[str, str]]:
    """Yields (part, owner) of each way to read `PART of OWNER`, the shortest owner first."""
    between = " of job " if kind in _OF_A_JOB else " of "
    at = rest.rfind(between)
    while at >= 0:
        yield rest[:at], rest[at + len(between) :]
        at = rest.rfind(between, 0, at + len(between) - 1)


def pager_title(entity: str, text: str) -> str:
    """`GPU 3 of n042: TEXT` in at most TITLE_LENGTH characters."""
    name = entity_name(entity)
    return cut_title(f"{name if name == entity else name[:1].upper() + name[1:]}: {text}")


def cut_title(title: str) -> str:
    """A title of at most TITLE_LENGTH characters: a longer one is cut after a word, with an ellipsis; within a word
    only if less than half would be left."""
    if len(title) <= TITLE_LENGTH:
        return title
    kept = title[:TITLE_LENGTH]
    words = kept.rpartition(" ")[0]
    return f"{(words if 2 * len(words) >= TITLE_LENGTH else kept[:-1]).rstrip(' ,;:')}…"


def add_to_title(title: str, affected: str) -> str:
    """`CDU c2: flow 193 L/min, minimum 225; job 81 hangs (64 GPUs)`: a title with the affected job. The number of GPUs,
    then all of it, is left out if that is longer than TITLE_LENGTH; also if the title names a job or rank itself."""
    if not affected or _NAMES_WORK.search(title):
        return title
    for text in (affected, affected.partition(" (")[0]):
        if len(title) + len(text) + 2 <= TITLE_LENGTH:
            return f"{title}; {text}"
    return title


def short_number(value: float) -> str:
    """Two significant digits at most beyond 1,000: `3`, `850`, `11k`, `2.4M`; below 10 one decimal: `0.3`."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            shown = value / scale
            return f"{shown:.1f}".removesuffix(".0") + unit if abs(shown) < 9.95 else f"{shown:.0f}{unit}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 9.95 else f"{value:.1f}"


def short_duration(seconds: float) -> str:
    """One unit: `45 s`, `12 min`, `3 h`, `2 d`."""
    for scale, unit, least in ((86_400, "d", 2), (3600, "h", 2), (60, "min", 2)):
        if seconds >= least * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
