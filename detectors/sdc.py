"""Finds GPUs and cores that compute wrong results: the same canary must give the same digest on every sound one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.conditions import Open, close, tell
from detectors.detector import Detector, notes
from pipeline.records import SECOND, Event, Finding, Frame, Level
from pipeline.topology import kind_of

_DAY = 86_400 * SECOND
_WAITING = 1000  # results of a canary that are kept until there is a majority; chosen
_VOTERS = 32  # devices remembered per answer: enough to tell a majority from a split; chosen
_ANSWERS = 8  # different answers remembered per canary; chosen
_ROUNDS = 64  # canaries remembered; a site that sets a new problem each round needs only the newest; chosen


@dataclass
class SdcVote(Detector):
    """Majority vote over canary digests; bit-exact, so there is nothing to learn and no noise.

    A result that bears the known answer (`expected`) is judged by it, alone too. Of others, with at least `quorum`
    devices, the answer of more than half is right. One mismatch is a suspect until the next right
    answer; `page_at` mismatches within `ledger_days` page and hold until `clean_runs` right answers running, or a
    reset. A wrong answer that `same_answer` GPUs, or cores of as many nodes, share is another version of the software
    and blames nobody.

    Source: Dixit et al., "Silent Data Corruptions at Scale" (arXiv 2102.11245): only known answers show wrong ones;
    two independent mismatches page because one may be a transient upset. No telemetry signal predicts such GPUs.
    """

    name: ClassVar[str] = "sdc"
    family: ClassVar[str] = "silent data corruption"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("event:digest",)
    blind: ClassVar[str] = (
        "Corruption that no canary's arithmetic touches, devices on which none runs, and a fault that most share."
    )

    quorum: int = 5
    page_at: int = 2
    same_answer: int = 3
    clean_runs: int = 10
    ledger_days: float = 7.0

    rounds: dict[str, dict[str, Any]] = notes()
    ledger: dict[str, list[dict[str, Any]]] = notes()
    conditions: Open = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        self._resets(frames)
        touched = [self._note(e) for e in _events(frames, "digest") if _complete(e)]
        for key in dict.fromkeys(touched):
            self._vote(key)
        self._forget(time)
        return self._findings(time)

    def _note(self, event: Event) -> str:
        """Keeps one result until its round has a majority; of the GPUs that agree, a sample is enough."""
        key, digest = f"{event.data['canary']}|{event.data['version']}", str(event.data["digest"])
        held = self.rounds.setdefault(key, {"votes": {}, "waiting": [], "time": event.time})
        held["time"] = max(held["time"], event.time)
        voters = held["votes"].setdefault(digest, [])
        if len(voters) < _VOTERS and event.entity not in voters:
            voters.append(event.entity)
        known = event.data.get("expected")
        if isinstance(known, str):
            self._by_known(event, key, digest, known)
        else:
            held["waiting"].append([event.time, event.entity, digest])
        return key

    def _by_known(self, event: Event, key: str, digest: str, known: str) -> None:
        """Judges one result by the answer that it should have been."""
        votes: dict[str, list[str]] = self.rounds[key]["votes"]
        if digest == known:
            self._clean(event.entity, key)
        elif _places(votes[digest]) < self.same_answer:
            total = len(set().union(*votes.values()))
            self._mismatch(event.entity, key, event.time, digest, known, (total, len(votes.get(known, ()))))
            self.ledger[event.entity][-1]["known"] = True

    def _vote(self, key: str) -> None:
        """Judges the waiting results of a canary by the answer that most GPUs gave."""
        held = self.rounds[key]
        votes: dict[str, list[str]] = held["votes"]
        right = min(votes, key=lambda d: (-len(votes[d]), d))
        agree = set(votes[right])
        total = len(agree.union(*votes.values()))
        if total < self.quorum or 2 * len(agree) <= total:
            del held["waiting"][:-_WAITING]
            if not held["waiting"]:  # all were judged by the known answer
                self._keep(held)
            return
        for time, gpu, answer in held["waiting"]:
            if answer == right:
                self._clean(gpu, key)
            elif _places(votes[answer]) < self.same_answer:
                # a wrong answer that several GPUs share is another software version, not a broken GPU
                self._mismatch(gpu, key, time, answer, right, (total, len(agree)))
        held["waiting"] = []
        self._keep(held)

    def _keep(self, held: dict[str, Any]) -> None:
        votes: dict[str, list[str]] = held["votes"]
        # the rarest and oldest answers go first: years of single wrong ones must not outvote the right one
        kept = sorted(votes, key=lambda d: len(votes[d]))[-_ANSWERS:]
        held["votes"] = {d: voters for d, voters in votes.items() if d in kept}

    def _mismatch(self, gpu: str, key: str, time: int, answer: str, expected: str, votes: tuple[int, int]) -> None:
        """Keeps a wrong answer. votes: how many GPUs answered, and how many of them alike."""
        entry = {
            "time": time,
            "canary": key,
            "digest": answer,
            "expected": expected,
            "peers": votes[0],
            "agreeing": votes[1],
            "clean": 0,
            "cleared": False,
        }
        known = self.ledger.setdefault(gpu, [])
        if any(e["time"] == time and e["canary"] == key for e in known):
            return
        for earlier in known:
            earlier["clean"] = 0
        self.ledger[gpu] = [*known, entry][-100:]

    def _clean(self, gpu: str, key: str) -> None:
        """One right answer lets a single mismatch go; a GPU with more must be right many times running.

        The version names the program; the canary may be a new problem each round.
        """
        known = self.ledger.get(gpu, [])
        mine = [e for e in known if _version(e["canary"]) == _version(key)]
        for entry in mine:
            entry["clean"] += 1
        enough = 1 if len(known) < self.page_at else self.clean_runs
        for entry in mine:
            entry["cleared"] |= entry["clean"] >= enough

    def _resets(self, frames: Mapping[str, Frame]) -> None:
        """A reset of the GPU, or of what it sits in, opens a new page for it."""
        reset = {e.entity for e in _events(frames, "reset")}
        if not reset or not self.ledger:
            return
        topology = next(iter(frames.values())).topology
        for gpu in list(self.ledger):
            if reset & {gpu, *topology.above(gpu)}:
                del self.ledger[gpu]

    def _forget(self, time: int) -> None:
        horizon = time - int(self.ledger_days * _DAY)
        for gpu, entries in list(self.ledger.items()):
            self.ledger[gpu] = [e for e in entries if e["time"] > horizon or not e["cleared"]]
            if not self.ledger[gpu]:
                del self.ledger[gpu]
        for key in sorted(self.rounds, key=lambda k: self.rounds[k]["time"])[:-_ROUNDS]:
            del self.rounds[key]

    def _holds(self, entries: list[dict[str, Any]]) -> bool:
        return any(not e["cleared"] for e in entries)

    def _findings(self, time: int) -> list[Finding]:
        holding = {gpu for gpu, entries in self.ledger.items() if self._holds(entries)}
        over = [(gpu, c) for gpu, c in sorted(self.conditions.items()) if gpu not in holding]
        found = [self._cleared(gpu, time, condition) for gpu, condition in over]
        close(self.conditions, holding)
        for gpu in sorted(holding):
            entries = self.ledger[gpu]
            level: Level = "page" if len(entries) >= self.page_at else "suspect"
            onset = min(e["time"] for e in entries if not e["cleared"])
            if due := tell(self.conditions, gpu, time, onset, level):
                found.append(self._finding(gpu, time, due, entries))
        return found

    def _cleared(self, gpu: str, time: int, condition: dict[str, Any]) -> Finding:
        """The end of a condition must be said: quiet is no sign of health where results are wrong now and then."""
        onset, level = condition["onset"], condition["level"]
        summary = f"{gpu} gave right results again, or was reset"
        return Finding(time, onset, gpu, self.name, level, 0.0, summary, {"cleared": True}, ("event:digest",))

    def _finding(self, gpu: str, time: int, due: tuple[int, Level], entries: list[dict[str, Any]]) -> Finding:
        last = entries[-1]
        canary, _, version = last["canary"].rpartition("|")
        against = "the known answer" if last.get("known") else f"{last['peers'] - 1} others"
        times = "once" if len(entries) == 1 else f"{len(entries)} times"
        return Finding(
            time=time,
            onset=due[0],
            entity=gpu,
            detector=self.name,
            level=due[1],
            score=float(len(entries)),
            summary=f"{gpu} gave a wrong result {times}: canary {canary} {version} against {against}",
            evidence={
                "mismatches": len(entries),
                "holds": True,
                "canary": canary,
                "version": version,
                "digest": last["digest"],
                "expected": last["expected"],
                "peers": last["peers"] - 1,
                "agreeing": last["agreeing"],
            },
            signals=("event:digest",),
        )


def _events(frames: Mapping[str, Frame], kind: str) -> Iterable[Event]:
    return (e for device_class in sorted(frames) for e in frames[device_class].events if e.kind == kind)


def _version(key: str) -> str:
    return key.rpartition("|")[2]


def _places(voters: list[str]) -> int:
    """How many voters may have software of their own: the cores of one node have one."""
    return len({v.rpartition(".")[0] if kind_of(v) == "cpu" else v for v in voters})


def _complete(event: Event) -> bool:
    """Whether the event is a canary's result; replica digests of ranks are voted on elsewhere."""
    return kind_of(event.entity) in ("gpu", "cpu") and all(k in event.data for k in ("canary", "version", "digest"))
