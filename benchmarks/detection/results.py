"""Findings and truth of one run of a suite, as a file from which a score can be computed at any later time.

Findings are kept, not scores, so a change of the scorer needs no new simulation. A file made by other code or another
scenario does not count: it is made again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agents.sim.fleet import stage_entity
from agents.sim.scenario import Scenario
from agents.sim.world import World
from benchmarks.detection.judge import Judged
from detectors.scoring.score import score
from pipeline.model.records import iso
from pipeline.model.topology import Topology, kind_of
from pipeline.recording.text_files import write_topology

_SAID = ("findings", "incidents", "truth", "placed")
Result = dict[str, Any]


def key_of(scenario: Scenario, seed: int, code: str) -> str:
    """Returns the key of a result: other code, scenario, world or seed give another."""
    world = None if scenario.world is None else scenario.world.number
    return hashlib.sha256(f"{scenario!r}\0{world}\0{seed}\0{code}".encode()).hexdigest()[:16]


def result_of(judged: Judged, key: str, code: str = "") -> Result:
    """Returns a run as plain data, with the part of the topology that it names. code: fingerprint of what judged it."""
    simulator = judged.simulator
    end = judged.node_days / simulator.scenario.fleet.nodes * 86_400
    result = {
        "key": key,
        "code": code,
        "node_days": judged.node_days,
        "samples": judged.samples,
        "seconds": judged.seconds,
        "meta": {
            "nodes": simulator.layout.nodes,
            "gpus": simulator.layout.gpus,
            "start": iso(simulator.start),
            "end": iso(simulator.time_at(end)),
            "samples": judged.samples,
            "cpu_seconds": sum(v for part, v in judged.seconds.items() if part != "simulation"),
            "world": about_world(simulator.scenario.world),
        },
        "findings": [f.as_json() for f in judged.findings],
        "incidents": [i.as_json() for i in judged.incidents],
        "truth": judged.truth,
        "placed": _placed(judged),
    }
    return {**result, "parents": _named(result, Topology(simulator.parents))}


def about_world(world: World | None) -> dict[str, Any] | None:
    """Returns what the page says of a world: number, half, structure in words."""
    if world is None:
        return None
    return {"number": world.number, "half": world.half, "text": ", ".join(world.structure)}


def _placed(judged: Judged) -> list[dict[str, Any]]:
    """Returns starts of jobs, as an agent sends them, with only the ranks that findings or truth name, and the first
    rank of each job in the truth.

    The score uses the place of a rank at that time. Limited to the named ranks: a whole fleet's starts are a
    thousand times as many.
    """
    said = {f.entity for f in judged.findings} | {e for i in judged.incidents for e in (i.cause, *i.members)}
    true = {e for line in judged.truth for e in (line["entity"], *line.get("entities", ()))}
    ranks = {entity for entity in said | true if kind_of(entity) == "rank"}
    simulator, lines = judged.simulator, []
    gpus = simulator.layout.entities["gpu"]
    end = judged.node_days / simulator.scenario.fleet.nodes * 86_400
    for stay in simulator.schedule.allocations_within(0.0, end):
        places = {
            rank: {"gpu": gpus[stay.gpus[i]], "stage": stage_entity(stay, int(stay.job.stage_of_rank[i]))}
            for i, rank in enumerate(stay.job.names)
            if rank in ranks or (i == 0 and stay.job.entity in true)
        }
        if places:
            time = iso(simulator.time_at(max(stay.begin, 0.0)))
            lines.append({"time": time, "entity": stay.job.entity, "kind": "job_start", "data": {"ranks": places}})
    return lines


def _named(result: Result, topology: Topology) -> dict[str, list[str]]:
    """Returns the lines of the topology for the named entities and all their ancestors."""
    named = {line["entity"]: None for part in ("findings", "truth") for line in result[part]}
    for line in result["truth"]:
        named |= dict.fromkeys(line.get("entities", ()))
    for line in result["incidents"]:
        named |= dict.fromkeys((line["cause"], line["entity"], *line["members"]))
    for line in result["placed"]:
        named |= {e: None for place in line["data"]["ranks"].values() for e in (place["stage"], place["gpu"])}
    every = {**named, **{above: None for entity in named for above in topology.ancestors(entity)}}
    # an entity without parents has no line: a line below it shows that it exists
    bare = {e for e in every if not topology.parents.get(e)}
    below = {above: e for e, line in topology.parents.items() for above in line if above in bare}
    return {e: list(topology.parents[e]) for e in (*every, *below.values()) if e in topology.parents}


def write(path: Path, result: Result) -> None:
    """Writes a file atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # a worker may outlive the suite that was killed
    partial.write_bytes(gzip.compress(json.dumps(result).encode(), 6, mtime=0))
    os.replace(partial, path)


def read(path: Path) -> Result | None:
    """Returns the result in a file; None if it is missing or truncated."""
    try:
        found: Result = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError):
        return None
    return found if {"key", *_SAID} <= found.keys() else None


def scored(result: Result) -> dict[str, Any]:
    """Returns the output of `fleetpulse score`."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        for part in _SAID:
            (place / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in result[part]))
        write_topology(place / "topology.toml", result["parents"], {})
        (place / "meta.json").write_text(json.dumps(result["meta"]))
        findings, incidents, truth, placed = (place / f"{part}.jsonl" for part in _SAID)
        return score(findings, truth, incidents, place / "topology.toml", place / "meta.json", events=[placed])
