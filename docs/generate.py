"""Writes docs/signals.md, events.md, detectors.md, simulator.md and exporters.md from the code: `make docs`.

tests/test_docs.py compares them. docs/coverage/*.toml lists which signals of the field are collected.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path

from agents.collectors.registry import COLLECTORS
from agents.sim.faults.kind import Kind
from agents.sim.kinds import CONFOUNDERS, FAULTS, describe
from agents.sim.world import AXES
from detectors import listing
from pipeline.foreign.mapping import MappedMetric
from pipeline.foreign.mapping import list_shipped
from pipeline.foreign.mapping import load_mapping
from pipeline.model.signals import CATALOGUE
from pipeline.model.signals import CLASSES
from pipeline.model.signals import Signal
from pipeline.model.signals import kinds_of_class
from pipeline.model.signals import signals_of_class
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.signals.otel import metrics_of_signal

INTRODUCTION = """# Signals

Everything that Fleetpulse measures. Written from the catalogue in `pipeline/model/signals/` by `make docs`; a new signal is one line there.

A counter is sent raw, as the device reports it; rates are derived where it is evaluated. A value outside *valid* is a
broken reading and counts as missing. *Column* is the name in the SQL view of the class: `SELECT time, entity, sm_clock FROM gpu`.
`fleetpulse signals --output json` gives the same as data.
"""
HEAD = "| signal | column | unit | kind | type | valid | harm | every | measured | source | collector | OpenTelemetry |"
COVERAGE = """## Coverage

Signals that an agent on a GPU node should deliver, by source, and which of them this agent collects. *In part* and *no* have a
reason. Attributes are part of the inventory (`entities.attributes`), events are in `events`.
"""
SECTIONS = {"gpu": "GPU", "nic": "Network port", "power": "Power", "host": "Host", "xid": "Kernel log and XIDs"}
SECTIONS |= {
    name: title
    for name, title in {
        "coolant": "Coolant",
        "accelerators": "Accelerators",
        "training": "Training",
        "fabric": "Fabric",
        "jobs": "Jobs",
        "canary": "Canaries",
        "exporters": "Other exporters",
    }.items()
    if (Path(__file__).with_name("coverage") / f"{name}.toml").exists()
}
COVERAGE_HEAD = "| asked for | collected | signals, events, attributes | source | why not |"
FOLDER = Path(__file__).with_name("coverage")


def signals() -> str:
    """Returns the text of docs/signals.md."""
    parts = [INTRODUCTION, COVERAGE, *(section_of_coverage(name, title) for name, title in SECTIONS.items())]
    for device_class in CLASSES:
        kinds = ", ".join(f"`{kind}:NAME`" for kind in kinds_of_class(device_class))
        lines = [f"## {device_class}\n\nEntities {kinds}.\n", HEAD, "|" + "---|" * HEAD.count(" | ") + "---|"]
        parts.append("\n".join([*lines, *(row(signal) for signal in signals_of_class(device_class))]) + "\n")
    return "\n".join(parts)


def coverage(name: str) -> list[dict[str, object]]:
    """Returns the rows of one table: name; its signals, events, attributes; reason if something is missing."""
    found: list[dict[str, object]] = tomllib.loads((FOLDER / f"{name}.toml").read_text())["row"]
    return found


def section_of_coverage(name: str, title: str) -> str:
    """Returns one table of the coverage."""
    lines = [f"### {title}\n", COVERAGE_HEAD, "|" + "---|" * COVERAGE_HEAD.count(" | ") + "---|"]
    return "\n".join([*lines, *map(coverage_row, coverage(name))]) + "\n"


def coverage_row(row: dict[str, object]) -> str:
    """Returns one line of the coverage. A row's own `source` takes precedence over the catalogue's, which may be another vendor's.

    The simulator, which the catalogue names too, collects nothing.
    """
    signals, events, attributes = (list(row.get(key, [])) for key in ("signals", "events", "attributes"))  # type: ignore[call-overload]
    parts = [
        *(f"`{name}`" for name in signals),
        *(f"event `{name}`" for name in events),
        *(f"attribute `{name}`" for name in attributes),
    ]
    sources_of = [CATALOGUE[name].source for name in signals] + [EVENT_KINDS[name].source for name in events]
    sources = dict.fromkeys(part for source in sources_of for part in source.split("; ") if part != "simulator")
    reason = str(row.get("reason", ""))
    collected = "no" if not parts else "in part" if reason else "yes"
    cells = (str(row["name"]), collected, ", ".join(parts), str(row.get("source") or "; ".join(sources)), reason)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def collectors_of(signal: str) -> str:
    """Returns the collectors of a signal; the agent itself for its own."""
    return ", ".join(c.name for c in COLLECTORS if signal in c.signals) or "simulator or agent"


EVENTS = """# Events

Things that happen once. Written from `pipeline/model/event_kinds.py` by `make docs`. Events are in the table `events`
(`SELECT time, entity, kind, data FROM events`) and may overtake telemetry.

| kind | happens to | what | data | source |
|---|---|---|---|---|
"""


def events() -> str:
    """Returns the text of docs/events.md."""
    lines = [
        f"| `{kind.name}` | {kind.entity} | {kind.help} | {', '.join(f'`{key}`' for key in kind.data)} | {kind.source} |"
        for kind in EVENT_KINDS.values()
    ]
    return EVENTS + "\n".join(lines) + "\n"


def row(signal: Signal) -> str:
    """Returns one line of a table."""
    low, high = signal.valid
    valid = "" if low == float("-inf") else f"{low:g} to {high:g}"
    states = f" ({', '.join(f'{i} = {name}' for i, name in enumerate(signal.states))})" if signal.states else ""
    source = signal.source.replace("|", "\\|")
    cells = (
        *(f"`{signal.name}`", f"`{signal.column}`", signal.unit, signal.kind, signal.type, valid, signal.harm),
        f"{signal.interval:g} s" if signal.interval else "",
        *(
            signal.help + states,
            source,
            collectors_of(signal.name),
            ", ".join(dict.fromkeys(f"`{metric.name}`" for metric in metrics_of_signal(signal))),
        ),
    )
    return f"| {' | '.join(cells)} |"


DETECTORS = """# Detectors

Detectors evaluate the telemetry. `make docs` writes this page from their docstrings; `fleetpulse detectors` lists the same.

A detector is disabled and reported as such if a required signal is missing. Optional signals raise its confidence. Each lists its
blind spots. Settings go into `[detector.NAME]` of the configuration.

## Calibration at the site

Thresholds of statistical detectors follow the quiet devices of the site. For each statistic and each product (`sku`,
else `model`), devices without a condition are watched in blocks of ten minutes: how near did they come to a condition?
The tail of that gives one factor for the threshold of the sum (within 15 and 30 at a tick of 10 s) and for the least
effect (never below the setting). With it a quiet device becomes a suspect as rarely as the setting `threshold` promises
for normal noise.

- A new site, or a new kind of device, starts with a factor of 3. After 20 minutes it is 1.5, or more where its noise
  demands it. Over hours it falls to the site's own factor: half the way after 4 hours of its own data.
- Evidence fades within a week, so seasons and new workloads are followed. Faults do not raise a threshold: they are too
  rare for the part of the tail that counts.
- Facts that are logged (fatal XID, leak, collapse of flow, lost GPU, wrong digest) need no calibration.
"""


def detectors() -> str:
    """Returns the text of docs/detectors.md."""
    return "\n".join([DETECTORS, *map(section, listing())])


def section(row: dict[str, object]) -> str:
    """One detector."""
    names = {
        key: ", ".join(f"`{name}`".replace(" or ", "` or `") for name in row[key]) or "none"
        for key in ("needs", "wants")
    }
    settings = [f"| `{name}` | `{json.dumps(value)}` |" for name, value in row["settings"].items()]
    lines = [
        f"## {row['name']}",
        textwrap.dedent("    " + str(row["about"])).strip(),
        f"- Finds: {row['family']}, on entities of the class `{row['class']}`",
        f"- Required signals: {names['needs']}; optional: {names['wants']}",
        f"- Blind spots: {row['blind']}",
    ]
    text = "\n\n".join([*lines[:2], "\n".join(lines[2:])])
    return text + "\n\n| setting | default |\n|---|---|\n" + "\n".join(settings) + "\n"


SIMULATOR = """# Simulator

A fleet with known faults: `fleetpulse simulate --scenario FILE.toml --seed N --output DIR`. The same scenario and seed
give the same bytes. Its output is **simulated**, has `sim-` in every name, and is simpler than real fleets:
[realism.md](realism.md). `make docs` writes the lists below; `fleetpulse simulate --list` prints them.

## A scenario

```toml
version = 1
duration = 86400            # s
interval = 10               # s between two samples; 1 s for faults of coolant, which are quick
start = 2026-01-01T00:00:00Z

[fleet]
nodes = 64
gpus_per_node = 8
missing = 0.01              # share of the values that are lost
jitter = 5.0                # s, maximum added to the time of a sample; up to half the interval

[jobs]
mean_hours = 12             # mean duration of a job; 0: two jobs that never end

[rates]
faults = 1.0                # factor on the published rates of faults; 0 (default): only what [[fault]] names
confounders = 1.0           # factor on the rates of benign events
apart = true                # half an hour between two events on one node; exceptions below

[rates.kinds]
link_flap = 0.02            # the rate of one kind, in the unit of the table below; `faults` multiplies it too

[[fault]]
kind = "straggler"          # any of the table below
entity = "gpu:sim-n003.1"   # drawn from the seed if absent, like every parameter
onset = 3600                # s after the start
end = 7200
slowdown = 0.15             # a parameter of the kind

[world]
number = 17                 # a drawn site; then interval, missing, jitter and mean_hours may be left out

[live]
every = 150                 # s: with --backfill, interval of faults after `duration`, in real time; 0: none
hours = 168                 # duration of that
```

- **Jobs** start, lose their nodes to faults, return on spare ones under the same name, and end. `rank:JOB.N` keeps its
  name and changes its GPU (`job_start` and `job_end` in `events.jsonl`); `topology.toml` has each rank's first GPU.
- **Hazard of a node**: published rate x a Gamma frailty (shape 0.2: the worst 5 % of the nodes have 44 % of the events)
  x infant mortality (three times at first, once after 30 days) x 2^((T - T0) / 10 K). Some kinds are precursors of
  others.
- **`apart`**: half an hour between two random events on a node; an event on a rack counts for its whole row. Events on
  jobs are apart only from others on that job, benign events of loops, PDUs and racks only from each other. Exempt are
  consequences of another fault, what a power cap affects beyond its PDU, and [[fault]]. An event without a free time is
  left out, reported, and counted in `meta.json` (`dropped` of `planned`).
- **Limits**: a million events and ten years. Files of `--output` are written atomically.
- **In process**: `FleetSimulator.snapshot()` after a block of 60 ticks and `restore()` into a new simulator of the same
  scenario and seed continue to the bit.

## Worlds

Without `[world]` the site is one liquid-cooled training hall. `number` draws another one from published facts
(`agents/sim/world.py` has the ranges and their sources): it differs in structure, not only in noise. `meta.json` has the
whole description. The same fault kinds happen in every world; those without what they affect (coolant loops of an
air-cooled hall) do not, and those that no collector shows are `invisible` in the truth.

WORLD_AXES
- **Halves**: a hash of the structure, the combination of these values, puts a world into `train` or `report`; no
  combination is in both. Detectors are tuned on `train`; `report` is for figures alone.
- **In process**: `worlds("train", 20)` draws the first worlds of a half; `Scenario.in_world(world)` sets the world with
  its interval, missing values, jitter and durations of jobs. A pattern for a suite: one scenario of 128 nodes and some
  days for each world; rates of faults in `Rates` as ever.
- **Benign in worlds alone**: reboots and upgrades that no one announces, drains, caps of some GPUs and silent BMCs
  happen at the rate of the world's habits; set-back at night, offsets, repeated readings, absurd single readings,
  standby supplies and ports that are down on purpose are part of its physics and have no line in the truth.

## truth.jsonl

One line per fault or benign event:

| field | meaning |
|---|---|
| `id`, `kind`, `onset`, `end` | the event |
| `signals` | signals and events that show the kind |
| `entity`, `entities` | the entity; all faulty ones, if they are not just that one (may be empty) |
| `class` | `hard`: a logged fact, or harm that needs a page; `soft`: visible only in statistics; `invisible`: not visible, also a soft fault on a GPU without a job; `benign` |
| `parameters` | those of the kind, `row` (of the table below), `attribution`, `severity` (0 to 1 within the kind's range), `effect` with `effect_unit` (a share, or K), for slowly growing faults `detectable`, for soft faults without a job `idle` |

"""
SIMULATOR_HEAD = "| row | kind | class | affects | effect | visible | not visible | rate | source | parameters |"


def simulator() -> str:
    """Returns the text of docs/simulator.md."""
    axes = "\n".join(f"- {axis}: {', '.join(f'`{v}`' for v in dict.fromkeys(values))}" for axis, values in AXES.items())
    page = SIMULATOR.replace("WORLD_AXES", axes)
    benign = "\n## Benign events\n\nA page on one of them is false.\n"
    return "\n".join([page + "## Faults\n", *kinds_table(FAULTS), benign, *kinds_table(CONFOUNDERS)]) + "\n"


def kinds_table(kinds: Iterable[type[Kind]]) -> list[str]:
    """Returns one row per kind, in the order of the rows."""
    rows = [kinds_row(kind) for kind in sorted(kinds, key=lambda k: (k.row, k.name))]
    return [SIMULATOR_HEAD, "|" + "---|" * (SIMULATOR_HEAD.count("|") - 1), *rows]


def kinds_row(kind: type[Kind]) -> str:
    """Returns one line of a table."""
    fields = describe(kind)
    parameters = ", ".join(f"`{name}`{span}" for name, span in fields["parameters"].items())
    cells = (
        str(kind.row),
        f"`{kind.name}`",
        kind.detectability,
        fields["target"],
        fields["happens"],
        fields["seen"],
        fields["unseen"],
        fields["rate"],
        kind.rate.source,
        parameters,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


EXPORTERS = """# Names of exporters

Which metric of another exporter becomes which signal ([signals.md](signals.md)), whether an agent scrapes it ([prometheus.md](prometheus.md)) or a Prometheus or Collector sends it ([otlp.md](otlp.md)). Written from
`pipeline/foreign/mappings/` by `make docs`. Every other metric of these exporters is kept as a custom signal. "Merged" combines several series of one device; over remote write such series stay custom signals.
"""


def exporters() -> str:
    """docs/exporters.md."""
    parts = [EXPORTERS]
    for name in list_shipped():
        mapping = load_mapping(name)
        parts += [f"## {name}", f"Names from: {mapping.source}."]
        head = ["| metric | series with | becomes | of | conversion |", "|---|---|---|---|---|"]
        rows = [mapped_row(metric, mapping.entity_template(metric)) for metric in mapping.metric]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def mapped_row(metric: MappedMetric, entity: str) -> str:
    """One line of a mapping's table."""
    labels = [f"`{key}={value}`".replace("|", "\\|") for key, value in metric.where.items()]
    labels += [f"no `{label}`" for label in metric.without]
    steps = [f"times {metric.scale:g}"] if metric.scale != 1 else []
    steps += [f"plus {metric.offset:g}"] if metric.offset else []
    steps += [f"merged: {metric.merge}"] if metric.merge else []
    steps += [", ".join(f"{value}: {state}" for value, state in metric.states.items())] if metric.states else []
    cells = f"`{metric.name}`", ", ".join(labels), f"`{metric.signal}`", f"`{entity}`", "; ".join(steps)
    return f"| {' | '.join(cells)} |"


PAGES = {
    "simulator.md": simulator,
    "signals.md": signals,
    "events.md": events,
    "detectors.md": detectors,
    "exporters.md": exporters,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page())
