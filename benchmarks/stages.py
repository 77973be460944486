"""From the onset of a fault to the delivered page, by stage, wall clock: through Kafka, to an HTTP receiver.

    python -m benchmarks.stages [--runs 5] [--stories pump link]

pump: coolant units of a real agent lose their flow, one after the other; BMCs need 0.1 s to answer.
link: ports of a simulated fleet of 16 nodes in real time, with the history of half an hour, flap and have errors.
Stages, all since the onset: the agent's event; the event stored; the incident a page in the API; the message written
to the outbox; the POST at the receiver. The API is asked every POLL s, so stored and incident are up to that late.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.alert_receiver import now, receiver
from benchmarks.delays import HISTORY, free_port
from benchmarks.edge import LEARN_S
from benchmarks.kafka import PATIENT, make_topics
from benchmarks.processes import Session, wait_for
from benchmarks.watched import Api
from pipeline.config.sections import Kafka
from pipeline.model.records import SECOND, from_iso
from tests.agents.redfish_double import Double, Fault
from tests.agents.redfish_trees import FLOW, SUPPLY_PRESSURE, cdu
from tests.kafka_broker import Broker, BrokerError, missing

ROOT = Path(__file__).parents[1]
STAGES = ("agent", "stored", "incident", "written", "received")
POLL, READY_S, PATIENCE_S, APART_S = 0.1, 90.0, 60.0, 20.0
"""s between two polls; for a start; after which a page counts as never; between two faults. Chosen."""
LATENCY_S, FAST_S = 0.1, 0.5
"""s a BMC needs to answer; between two readings of flow and pressure. As in benchmarks.edge."""
EVENTS = """SELECT entity, epoch_us(min(time)) FROM events
WHERE kind IN ('flow_collapse', 'pressure_collapse', 'link_state') AND time >= make_timestamptz({since})
GROUP BY entity"""


@dataclass
class Run:
    """One fault: what its entities begin with, its onset (UTC us), and when it reached each stage."""

    prefix: str
    onset: int = 0
    at: dict[str, int] = field(default_factory=dict)

    def reach(self, stage: str, time_us: int) -> None:
        """Notes the first time of a stage; before its onset nothing is wrong with it."""
        self.at.setdefault(stage, time_us)

    def seconds(self, stage: str) -> float:
        """Returns the seconds since the onset; infinite if it was not reached."""
        return (self.at[stage] - self.onset) / SECOND if stage in self.at else float("inf")


def note_page(runs: Sequence[Run], at: int, labels: Mapping[str, Any]) -> None:
    """Notes that a page arrived in the runs that it is about."""
    for run in runs if labels["severity"] == "critical" else ():
        if labels["cause"].startswith(run.prefix):
            run.reach("received", at)


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    """Returns the JSON of an answer of the API."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return json.load(answer)


def watch(api: str, runs: Sequence[Run], stop: threading.Event) -> None:
    """Notes events, incidents and messages of the runs until `stop`."""
    begun = now()
    while not stop.wait(POLL):
        try:
            rows = fetch(f"{api}/sql", {"query": EVENTS.format(since=begun)})["rows"]
            incidents = fetch(f"{api}/incidents")["incidents"]
        except (OSError, ValueError, KeyError):
            continue  # it is starting
        for run in runs:
            for _, at in (row for row in rows if run.prefix in row[0]):
                run.reach("agent", at)
                run.reach("stored", now())
            for one in incidents:
                if one["severity"] == "page" and one["cause"].startswith(run.prefix):
                    run.reach("incident", now())
                    _note_message(api, run, one["id"])


def _note_message(api: str, run: Run, incident: str) -> None:
    if "written" not in run.at:
        sent = fetch(f"{api}/notifications?incident={incident}")["notifications"]
        for message in sorted(sent, key=lambda row: str(row["created"])):
            run.reach("written", from_iso(message["created"]))


def settings(folder: Path, broker: Broker, api: int, hook: int, more: str = "") -> Path:
    """Writes the configuration of agent and pipeline."""
    path = folder / "fleetpulse.toml"
    path.write_text(
        f"[pipeline]\ntransport = 'kafka'\n[kafka]\nbootstrap_servers = '{broker.bootstrap}'\npartitions = 4\n"
        f"[api]\nport = {api}\n[store]\npath = '{folder}/store.duckdb'\n[spool]\ndirectory = '{folder}/spool'\n"
        f"[[notify.webhooks]]\nname = 'pager'\nurl = 'http://127.0.0.1:{hook}/'\nallow_http = true\n{more}"
    )
    return path


def start(stack: ExitStack, folder: Path, name: str, *words: str) -> Session:
    """Starts a command of Fleetpulse; it ends with the stack."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLEETPULSE")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "fleetpulse.py"), name, "--config", str(folder / "fleetpulse.toml"), *words]
    session = Session(command, environ, folder, folder / f"{name}.log")
    stack.callback(session.end)
    return session


@contextmanager
def running(runs: Sequence[Run], folder: Path, more: str, sender: Callable[[ExitStack], None]) -> Iterator[None]:
    """Kafka, receiver, pipeline and what sends, watched."""
    with ExitStack() as stack:
        hook = stack.enter_context(receiver(partial(note_page, runs)))
        broker = stack.enter_context(Broker(folder / "broker", heap="512m", properties=PATIENT))
        make_topics(Kafka(bootstrap_servers=broker.bootstrap, partitions=4))
        port, stop = free_port(), threading.Event()
        settings(folder, broker, port, hook, more)
        sender(stack)
        start(stack, folder, "pipeline")
        wait_for(lambda: Api(port).ready()[0], READY_S, "the API of the pipeline")
        watcher = threading.Thread(target=watch, args=(f"http://127.0.0.1:{port}/api/v1", runs, stop))
        watcher.start()
        stack.callback(watcher.join)
        stack.callback(stop.set)
        yield


def pump(number: int, folder: Path) -> list[Run]:
    """Flow and pressure of one coolant unit after the other fall to a quarter, as when its pump stops."""
    runs = [Run(f"cdu:c{n}.") for n in range(number)]
    with ExitStack() as outer:
        doubles = [outer.enter_context(Double(cdu())) for _ in runs]
        for double in doubles:
            double.fault("/redfish/*", Fault(delay=LATENCY_S))
        (folder / "password").touch(0o600)
        (folder / "password").write_text(doubles[0].password)
        more = '[agent]\nnode = "row1"\n' + "".join(_bmc(n, d, folder) for n, d in enumerate(doubles))
        with running(runs, folder, more, lambda stack: start(stack, folder, "agent") and None):
            time.sleep(LEARN_S)
            for run, double in zip(runs, doubles, strict=True):
                run.onset = now()
                double.set(SUPPLY_PRESSURE, "/Reading", 60.0)  # kPa; without its fall the flow meter is doubted
                double.set(FLOW, "/Reading", 90.0)
                time.sleep(APART_S)
            _await(runs)
    return runs


def _bmc(number: int, double: Double, folder: Path) -> str:
    return (
        f'[[collector.redfish.bmcs]]\nname = "c{number}"\nurl = "{double.url}"\nallow_http = true\n'
        f'user = "{double.user}"\npassword_file = "{folder}/password"\nparents = ["rack:r{number}"]\nfast = {FAST_S}\n'
    )


def link(number: int, folder: Path) -> list[Run]:
    """One port after the other flaps every quarter of a minute, with symbol errors between."""
    runs = [Run(f"port:sim-n{2 * n + 1:03d}.mlx5_{n}") for n in range(number)]
    length = APART_S * number + PATIENCE_S
    lines = [f"version = 1\nduration = {HISTORY + length:.1f}\ninterval = 1\n[fleet]\nnodes = 16\ngpus_per_node = 8\n"]
    for n, run in enumerate(runs):
        onset = HISTORY + 10.4 + APART_S * n  # not on a second, so that no fault is synchronous with samples
        lines.append(
            f'[[fault]]\nkind = "link_degradation"\nentity = "{run.prefix}"\nonset = {onset:.3f}\n'
            f"end = {HISTORY + length:.1f}\nsymbol_rate = 5.0\nflap_every = 15.0\nflap_length = 4.0\n"
        )
    (folder / "scenario.toml").write_text("".join(lines))
    simulators: list[Session] = []
    with running(runs, folder, "", lambda stack: simulators.append(_simulate(stack, folder))):
        simulators[0].process.wait(HISTORY + length)
    truth = [json.loads(line) for line in (folder / "truth/truth.jsonl").read_text().splitlines()]
    for run in runs:
        run.onset = next(from_iso(t["onset"]) for t in truth if t["entity"] == run.prefix)
    return runs


def _simulate(stack: ExitStack, folder: Path) -> Session:
    """Starts the simulator; returns it when its history is sent."""
    words = ("--scenario", "scenario.toml", "--seed", "7", "--output", "truth", "--to", "kafka", "--speed", "1")
    made = start(stack, folder, "simulate", *words, "--backfill", str(HISTORY))
    wait_for(lambda: "back-fill sent" in made.log.read_text(), 600.0, "the history")
    return made


def _await(runs: Sequence[Run]) -> None:
    """Waits until all runs are through, at most PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not all("received" in run.at and "written" in run.at for run in runs):
        time.sleep(POLL)


def table(story: str, runs: Sequence[Run]) -> str:
    """Returns a row of Markdown for each stage: smallest, median and largest seconds since the onset."""
    lines = []
    for stage in STAGES:
        took = sorted(run.seconds(stage) for run in runs)
        lines.append(f"| {story} | {stage} | {took[0]:.1f} | {statistics.median(took):.1f} | {took[-1]:.1f} |")
    return "\n".join(lines)


STORIES: Mapping[str, Callable[[int, Path], list[Run]]] = {"pump": pump, "link": link}


def main() -> int:
    """Prints the table of each story."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--stories", nargs="*", choices=tuple(STORIES), default=tuple(STORIES))
    options = parser.parse_args()
    if absent := missing():
        raise BrokerError(absent)
    print(f"load {os.getloadavg()[0]:.1f}\n| fault | stage | min (s) | median (s) | max (s) |\n|---|---|---|---|---|")
    for story in options.stories:
        with tempfile.TemporaryDirectory(prefix=f"fleetpulse-stages-{story}-") as name:
            print(table(story, STORIES[story](options.runs, Path(name))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
