"""Whose answer to a canary is right: the known one, else that of most devices of a kind; a split blames nobody.

How many devices answered what of late: exact for a small fleet, an even sample of a large one.

Devices that have software of their own: of cores only those of different nodes have.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detectors.base.event_data import read_integer, read_text
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import kind_of


def places(devices: Iterable[str]) -> int:
    """How many of the devices may have software of their own: the cores of one node have one."""
    return len({d.rpartition(".")[0] if kind_of(d) == "cpu" else d for d in devices})


MOST = 512
"""Devices remembered: a share of a half is then known to within 5 %, whatever the size of the fleet. Chosen."""


class Poll:
    """The newest answer of each device, or of an even share of them where they are more than MOST.

    The share is drawn by the devices' names, not by who told last: so those who tell often, or late, weigh no more.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.halvings: int = state["halvings"] if state else 0
        self.of: dict[str, list[Any]] = {e: list(told) for e, told in state["of"].items()} if state else {}

    def tell(self, entity: str, time: int, answer: object) -> None:
        """Enters an answer in place of the device's one before."""
        if _drawn(entity, self.halvings):
            self.of[entity] = [time, answer]
            while len(self.of) > MOST:
                self.halvings += 1
                self.of = {e: told for e, told in self.of.items() if _drawn(e, self.halvings)}

    def forget(self, horizon: int) -> None:
        """Lets answers from before `horizon` go."""
        self.of = {e: told for e, told in self.of.items() if told[0] >= horizon}

    def count(self) -> dict[Any, int]:
        """Devices by answer."""
        found: dict[Any, int] = {}
        for _, answer in self.of.values():
            found[answer] = found.get(answer, 0) + 1
        return found

    def newest(self) -> int:
        return max((time for time, _ in self.of.values()), default=0)

    def snapshot(self) -> dict[str, Any]:
        return {"halvings": self.halvings, "of": {e: list(told) for e, told in self.of.items()}}


class Known(Poll):
    """Who gave the known answer of late (True), and who failed to within a day (False), whatever he did since."""

    def right(self, entity: str, time: int, lately: int) -> None:
        """lately: before then a wrong answer counts no more."""
        before = self.of.get(entity)
        if before is None or before[1] or before[0] < lately:
            self.tell(entity, time, True)

    def state(self, same: int) -> tuple[int, int, bool]:
        """Wrong and right devices, and whether the program is broken: more fail it than not, and in several places."""
        wrong = [e for e, (_, right) in self.of.items() if not right]
        right = len(self.of) - len(wrong)
        return len(wrong), right, len(wrong) > right and places(wrong) >= same


def _drawn(entity: str, halvings: int) -> bool:
    if not halvings:
        return True
    mixed = zlib.crc32(entity.encode()) * 0x9E3779B1 >> 12  # the multiplication parts names that differ in one place
    return not mixed & ((1 << halvings) - 1)


_log = logging.getLogger("fleetpulse.detectors")

_WAITING = 1000  # results of a canary that are kept until there is a majority; chosen
_VOTERS = 32  # devices remembered per wrong answer: enough to tell whether several share it; chosen
_ANSWERS = 8  # different answers remembered of a canary that was judged; chosen
_MOST_ANSWERS = 2 * _VOTERS  # and of one on which the devices are divided, so that it stays divided; chosen
_ROUNDS = 64  # canaries remembered; a site that sets a new problem each round needs only the newest; chosen
LATELY = 86_400 * SECOND
"""Who was right or wrong within a day counts, as agents tell of right rounds every 6 hours. Chosen."""
_MOST_ROUNDS = 1_000_000  # that one event tells of: years of rounds; chosen
_TEXTS = ("format", "range", "sm", "uuid")
_COUNTS = ("rounds", "again")
_FACTS = frozenset((*_TEXTS, *_COUNTS, "wrong"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one result was worth.

    canary, version: the problem and the program that asks it.   facts: what the agent told beside.
    voters, agreeing: devices that answered lately, and those of them that gave `expected`; of many a share.
    known: judged by the known answer, not by the others'.   question: what was voted on, else empty.
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
    question: str = ""


@dataclass(frozen=True, slots=True)
class Unjust:
    """Mismatches that no device is to blame for.

    why: shared (other devices give the same `answer`), or broken (most devices fail this version of the program).
    Of broken ones those since `since`: with a known answer of devices of a `kind`, else to one `question`.
    """

    why: str
    version: str
    answer: str = ""
    kind: str = ""
    question: str = ""
    since: int = 0

    def holds(self, entity: str, entry: Mapping[str, Any]) -> bool:
        """Whether it is about a mismatch of the ledger."""
        if entry["version"] != self.version:
            return False
        if self.why == "shared":
            return bool(entry["digest"] == self.answer)
        if entry["time"] < self.since:
            return False
        if self.kind:
            return entry["known"] and kind_of(entity) == self.kind
        return bool(entry["question"] == self.question)


class Votes:
    """The newest answers to each canary; a part() of SdcVote. Bit-exact: there is nothing to learn and no noise.

    A canary without known answer is one question per version, SKU and driver: other software may round otherwise.
    rounds: question -> the devices by answer; where answers are known the wrong ones alone.
    polls:  question without known answer -> what most answer.
    known:  version and kind of device -> who gave the known answers, and who did not.
    unjust: mismatches found since the last look to be the software's, not a broken device's.
    """

    def __init__(self) -> None:
        self.rounds: dict[str, dict[str, Any]] = {}
        self.polls: dict[str, Poll] = {}
        self.known: dict[str, Known] = {}
        self.unjust: list[Unjust] = []

    def judge(self, events: Sequence[tuple[Event, str]], quorum: int, same: int) -> list[Verdict]:
        """Verdicts that the results of an instant make possible, in order of time: all of them are heard first.

        With each result what devices must have in common to be compared, where no answer is known.
        """
        found: list[Verdict] = []
        asked: dict[str, dict[str, Any]] = {}
        for event, like in events:
            data, known = event.data, read_text(event.data.get("expected"))
            version, digest = word(data["version"]), word(data["digest"])
            if known == digest:
                self._poll(version, event.entity).right(event.entity, event.time, event.time - LATELY)
                of = (event.entity, event.time, True, word(data["canary"]), version, digest, known)
                found.append(Verdict(*of, 0, 0, True, facts(data)))
                continue
            key, held = self._round(event, known, like)
            poll = self._poll(version, event.entity) if known else self.polls.setdefault(key, Poll())
            poll.tell(event.entity, event.time, False if known else digest)
            self._count(held, digest, event)
            held["waiting"].append([event.time, event.entity, digest, facts(data)])
            asked[key] = held
        for key, held in asked.items():
            found += self._by_known(held, same) if held["known"] else self._by_most(key, held, quorum, same)
        return sorted(found, key=lambda v: (v.time, v.entity, v.canary, v.right))

    def _poll(self, version: str, entity: str) -> Known:
        key = f"{kind_of(entity)}|{version}"
        if key not in self.known:
            self.known[key] = Known()
        return self.known[key]

    def _round(self, event: Event, known: str, like: str) -> tuple[str, dict[str, Any]]:
        canary, version = word(event.data["canary"]), word(event.data["version"])
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
        waiting, held["waiting"] = held["waiting"], []
        version, lately = held["version"], held["time"] - LATELY
        states = {}
        for kind in sorted({kind_of(entity) for _, entity, _, _ in waiting}):
            poll = self.known[f"{kind}|{version}"]
            poll.forget(lately)
            states[kind] = poll.state(same)
            if states[kind][2]:  # most get it wrong, each in its own way
                self.unjust.append(Unjust("broken", version, kind=kind, since=lately))
        self._state(held, any(s[2] for s in states.values()), sum(s[0] + s[1] for s in states.values()))
        found = []
        for time, entity, answer, told in waiting:
            wrong, right, broken = states[kind_of(entity)]
            if not self._foreign(version, answer, held["votes"].get(answer, {}), same) and not broken:
                of = (entity, time, False, held["canary"], version, answer, held["known"])
                found.append(Verdict(*of, wrong + right, right, True, told))
        _keep(held, _ANSWERS)
        return found

    def _by_most(self, key: str, held: dict[str, Any], quorum: int, same: int) -> list[Verdict]:
        votes = self.polls[key].count()
        most = min(votes, key=lambda d: (-votes[d], d))
        agreeing, total = votes[most], sum(votes.values())
        divided = total < quorum or 2 * agreeing <= total
        self._state(held, divided and total >= quorum, total)
        if divided:
            if held["split"]:
                since = held["time"] - LATELY
                self.unjust.append(Unjust("broken", held["version"], question=key, since=since))
            del held["waiting"][:-_WAITING]
            return []
        waiting, held["waiting"] = held["waiting"], []
        found, version = [], held["version"]
        for time, entity, answer, told in waiting:
            right = answer == most
            if right or not self._foreign(version, answer, held["votes"].get(answer, {}), same):
                of = (entity, time, right, held["canary"], version, answer, most)
                found.append(Verdict(*of, total, agreeing, False, told, key))
        _keep(held, _ANSWERS)
        return found

    def _foreign(self, version: str, answer: str, voters: Mapping[str, int], same: int) -> bool:
        """Whether several give this wrong answer: other software, since two devices do not break alike to the bit."""
        if places(voters) < same:
            return False
        self.unjust.append(Unjust("shared", version, answer))
        return True

    def _state(self, held: dict[str, Any], split: bool, voters: int) -> None:
        """Says once that nobody can be judged."""
        if split and not held["split"]:
            what = "most of them fail its known answer" if held["known"] else "no answer is most's"
            _log.warning(
                "canary %s %s, told by %d devices: %s; nobody is blamed", held["canary"], held["version"], voters, what
            )
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
        self.polls = {key: poll for key, poll in self.polls.items() if key in self.rounds}
        for poll in self.polls.values():
            poll.forget(horizon)
        for key in sorted(self.known, key=lambda k: self.known[k].newest())[:-_ROUNDS]:
            del self.known[key]

    def divided(self) -> list[str]:
        """Canaries on which the devices are divided, so that nobody can be judged by them."""
        return sorted({f"{held['canary']} {held['version']}" for held in self.rounds.values() if held["split"]})

    def snapshot(self) -> dict[str, Any]:
        polls = {
            name: {key: poll.snapshot() for key, poll in polls.items()}
            for name, polls in (("polls", self.polls), ("known", self.known))
        }
        return {"rounds": copy.deepcopy(self.rounds), **polls}

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]
        self.polls = {key: Poll(poll) for key, poll in state["polls"].items()}
        self.known = {key: Known(poll) for key, poll in state["known"].items()}


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
    found: dict[str, Any] = {k: v for k in _TEXTS if (v := word(data.get(k)))}
    for name in _COUNTS:
        value = read_integer(data.get(name), high=_MOST_ROUNDS)
        if value is not None:
            found[name] = value
    if isinstance(wrong := data.get("wrong"), (list, tuple)):
        found["wrong"] = [read_text(problem) for problem in wrong[:8] if read_text(problem)]
    return found


def complete(event: Event) -> bool:
    """Whether the event is a canary's result. A program that raised an error is loud: the driver tells of it."""
    if kind_of(event.entity) not in ("gpu", "cpu"):
        return False
    if not all(word(event.data.get(k)) for k in ("canary", "version", "digest")):
        return False
    return not word(event.data["digest"]).startswith("raised ")


def word(value: object) -> str:
    """A text, or a number that stands for one; "" for anything else."""
    return read_text(value) or ("" if (number := read_integer(value)) is None else str(number))
