"""Whose answer to a canary is right: the known one, else that of most devices of a kind; a split blames nobody."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.records import SECOND, Event
from pipeline.topology import kind_of

_log = logging.getLogger("fleetpulse.detectors")

_WAITING = 1000  # results of a canary that are kept until there is a majority; chosen
_VOTERS = 32  # devices remembered per answer: enough to tell a majority from a split; chosen
_ANSWERS = 8  # different answers remembered of a canary that was judged; chosen
_MOST_ANSWERS = 2 * _VOTERS  # and of one on which the devices are divided, so that it stays divided; chosen
_ROUNDS = 64  # canaries remembered; a site that sets a new problem each round needs only the newest; chosen
_LATELY = 86_400 * SECOND  # who was right or wrong within a day, as agents tell of right rounds every 6 hours; chosen
_TEXTS = ("format", "range", "sm", "uuid")
_COUNTS = ("rounds", "again")
_FACTS = frozenset((*_TEXTS, *_COUNTS, "wrong"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one result was worth.

    canary, version: the problem and the program that asks it.   facts: what the agent told beside.
    voters, agreeing: devices that answered lately, and those of them that gave `expected`.
    known: judged by the known answer, not by the others'.
    """

    entity: str
    time: int
    right: bool
    canary: str
    version: str
    answer: str
    expected: str
    voters: int
    agreeing: int
    known: bool
    facts: Mapping[str, Any]


class Votes:
    """The newest answers to each canary; a part() of SdcVote. Bit-exact: there is nothing to learn and no noise.

    A canary without known answer is one question per version, SKU and driver: other software may round otherwise.
    rounds: question -> the devices by answer; where answers are known the wrong ones alone.
    good:   version -> the devices whose known answers were right last.
    shared: (version, answer) found since the last look to be another software's, not a broken device's.
    """

    def __init__(self) -> None:
        self.rounds: dict[str, dict[str, Any]] = {}
        self.good: dict[str, dict[str, int]] = {}
        self.shared: list[tuple[str, str]] = []

    def judge(self, events: Sequence[tuple[Event, str]], quorum: int, same: int) -> list[Verdict]:
        """Verdicts that the results of an instant make possible, in order of time: all of them are heard first.

        With each result what devices must have in common to be compared, where no answer is known.
        """
        found: list[Verdict] = []
        asked: dict[str, dict[str, Any]] = {}
        for event, like in events:
            data, known = event.data, event.data.get("expected")
            version, digest = str(data["version"]), str(data["digest"])
            if isinstance(known, str) and known == digest:
                _newest(self.good.setdefault(version, {}), event)
                of = (event.entity, event.time, True, str(data["canary"]), version, digest, known)
                found.append(Verdict(*of, 0, 0, True, facts(data)))
                continue
            key, held = self._round(event, known if isinstance(known, str) else "", like)
            self._count(held, digest, event)
            held["waiting"].append([event.time, event.entity, digest, facts(data)])
            asked[key] = held
        for held in asked.values():
            found += self._by_known(held, same) if held["known"] else self._by_most(held, quorum, same)
        return sorted(found, key=lambda v: (v.time, v.entity, v.canary, v.right))

    def _round(self, event: Event, known: str, like: str) -> tuple[str, dict[str, Any]]:
        canary, version = str(event.data["canary"]), str(event.data["version"])
        key = f"{canary}|{version}|{known or like}"
        held = self.rounds.get(key)
        if held is None:
            held = {"canary": canary, "version": version, "known": known, "time": event.time}
            held |= {"votes": {}, "waiting": [], "split": False}
            self.rounds[key] = held
        held["time"] = max(held["time"], event.time)
        return key, held

    def _count(self, held: dict[str, Any], digest: str, event: Event) -> None:
        """Keeps the newest voters of an answer, a device under one answer only."""
        votes: dict[str, dict[str, int]] = held["votes"]
        _newest(votes.setdefault(digest, {}), event)
        if len(votes) > 1:
            for other, voters in votes.items():
                if other != digest:
                    voters.pop(event.entity, None)
            if len(votes) > _MOST_ANSWERS:
                _keep(held, _MOST_ANSWERS)

    def _by_known(self, held: dict[str, Any], same: int) -> list[Verdict]:
        """Verdicts on wrong answers where the right one is known."""
        version = held["version"]
        right = self.good.get(version, {})
        for _, entity, _, _ in held["waiting"]:
            right.pop(entity, None)
        lately = held["time"] - _LATELY
        wrong = sum(time >= lately for voters in held["votes"].values() for time in voters.values())
        right = {entity: time for entity, time in right.items() if time >= lately}
        broken = wrong >= same and wrong > len(right) > 0  # most get it wrong, each in its own way: a broken program
        self._state(held, broken, wrong + len(right))
        waiting, held["waiting"] = held["waiting"], []
        _keep(held, _ANSWERS)
        found = []
        for time, entity, answer, told in () if broken else waiting:
            if not self._foreign(version, answer, held["votes"].get(answer, {}), same):
                of = (entity, time, False, held["canary"], version, answer, held["known"])
                found.append(Verdict(*of, wrong + len(right), len(right), True, told))
        return found

    def _by_most(self, held: dict[str, Any], quorum: int, same: int) -> list[Verdict]:
        votes: dict[str, dict[str, int]] = held["votes"]
        most = min(votes, key=lambda d: (-len(votes[d]), d))
        agreeing, total = len(votes[most]), sum(map(len, votes.values()))
        divided = total < quorum or 2 * agreeing <= total
        self._state(held, divided and total >= quorum, total)
        if divided:
            del held["waiting"][:-_WAITING]
            return []
        waiting, held["waiting"] = held["waiting"], []
        found, version = [], held["version"]
        for time, entity, answer, told in waiting:
            right = answer == most
            if right or not self._foreign(version, answer, votes.get(answer, {}), same):
                of = (entity, time, right, held["canary"], version, answer, most)
                found.append(Verdict(*of, total, agreeing, False, told))
        _keep(held, _ANSWERS)
        return found

    def _foreign(self, version: str, answer: str, voters: Mapping[str, int], same: int) -> bool:
        """Whether several give this wrong answer: other software, since two devices do not break alike to the bit."""
        if _places(voters) < same:
            return False
        self.shared.append((version, answer))
        return True

    def _state(self, held: dict[str, Any], split: bool, voters: int) -> None:
        """Says once that nobody can be judged."""
        if split and not held["split"]:
            text = "canary %s %s: %d devices gave %d different answers and no answer is most's; nobody is blamed"
            _log.warning(text, held["canary"], held["version"], voters, len(held["votes"]))
        held["split"] = split

    def forget(self, horizon: int) -> None:
        """Lets votes from before `horizon` go, and the canaries that nobody runs any more."""
        for held in self.rounds.values():
            old = {d: v for d, v in held["votes"].items() if not v or next(iter(v.values())) < horizon}
            for answer, voters in old.items():
                held["votes"][answer] = {entity: time for entity, time in voters.items() if time >= horizon}
                if not held["votes"][answer]:
                    del held["votes"][answer]
        for key in sorted(self.rounds, key=lambda k: self.rounds[k]["time"])[:-_ROUNDS]:
            del self.rounds[key]
        for version in sorted(self.good, key=lambda v: max(self.good[v].values(), default=0))[:-_ROUNDS]:
            del self.good[version]

    def divided(self) -> list[str]:
        """Canaries on which the devices are divided, so that nobody can be judged by them."""
        return sorted({f"{held['canary']} {held['version']}" for held in self.rounds.values() if held["split"]})

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy({"rounds": self.rounds, "good": self.good})

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds, self.good = state["rounds"], state["good"]


def _newest(voters: dict[str, int], event: Event) -> None:
    """Adds a voter, and lets the one go that voted longest ago."""
    voters.pop(event.entity, None)
    voters[event.entity] = event.time
    if len(voters) > _VOTERS:
        del voters[next(iter(voters))]


def _keep(held: dict[str, Any], answers: int) -> None:
    """The rarest and oldest answers go first: years of single wrong ones must not outvote the right one."""
    votes: dict[str, dict[str, int]] = held["votes"]
    if len(votes) > answers:
        kept = sorted(votes, key=lambda d: (len(votes[d]), max(votes[d].values(), default=0)))[-answers:]
        held["votes"] = {d: voters for d, voters in votes.items() if d in kept}


def facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says beside its digest, as far as it is of the right kind."""
    if _FACTS.isdisjoint(data):
        return {}
    found: dict[str, Any] = {k: v for k in _TEXTS if isinstance(v := data.get(k), (str, int))}
    for name in _COUNTS:
        value = data.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            found[name] = value
    if isinstance(wrong := data.get("wrong"), (list, tuple)):
        found["wrong"] = [str(problem) for problem in wrong[:8]]
    return found


def complete(event: Event) -> bool:
    """Whether the event is a canary's result. A program that raised an error is loud: the driver tells of it."""
    if kind_of(event.entity) not in ("gpu", "cpu") or not all(k in event.data for k in ("canary", "version", "digest")):
        return False
    return not str(event.data["digest"]).startswith("raised ")


def _places(voters: Mapping[str, int]) -> int:
    """How many voters may have software of their own: the cores of one node have one."""
    return len({v.rpartition(".")[0] if kind_of(v) == "cpu" else v for v in voters})
