"""Which answers to a canary are right: the known one, else that of most similar devices; a split blames no device."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from detectors.base.event_data import read_integer, read_text
from detectors.base.state import State, notes, parts
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import kind_of

_log = logging.getLogger("fleetpulse.detectors")

RECENT = 86_400 * SECOND
"""us for which a right or wrong answer counts, as agents report right rounds every 6 hours. Chosen."""
MAX_POLLED = 512
"""Devices kept of a poll: a share of a half is then known to within 5 %, whatever the size of the fleet. Chosen."""
_MAX_WAITING = 1000  # results of a canary that are kept until there is a majority; chosen
_MAX_VOTERS = 32  # devices kept per wrong answer: enough to know whether several share it; chosen
_MAX_ANSWERS_JUDGED = 8  # different answers kept of a canary that was judged; chosen
_MAX_ANSWERS_SPLIT = 2 * _MAX_VOTERS  # and of one on which devices are split, so that it stays split; chosen
_MAX_CANARIES = 64  # a site that sets a new problem each round needs only the newest; chosen
_MAX_ROUNDS = 1_000_000  # in one event: years of rounds; chosen
_MAX_PROBLEMS = 8  # kept of one event; chosen
_TEXTS = ("format", "range", "sm", "uuid")
_COUNTS = ("rounds", "again")
_FACTS = frozenset((*_TEXTS, *_COUNTS, "wrong"))


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """What one result of a canary means.

    canary, version: the problem and the program that computes it.   facts: what else the agent reported.
    voters, agreeing: devices that answered recently, and those of them that gave `expected`; of many a share.
    known: judged by the known answer, not by the others'.   question: subject of the vote, else empty.
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
class FalseMismatch:
    """Mismatches for which no device is to blame.

    why: shared (other devices give the same `answer`), or broken (most devices fail this version of the program).
    Of broken ones those since `since`: with a known answer of devices of a `kind`, else to one `question`.
    """

    why: str
    version: str
    answer: str = ""
    kind: str = ""
    question: str = ""
    since: int = 0

    def covers(self, entity: str, entry: Mapping[str, Any]) -> bool:
        """Returns whether a mismatch of the ledger is one of them."""
        if entry["version"] != self.version:
            return False
        if self.why == "shared":
            return bool(entry["digest"] == self.answer)
        if entry["time"] < self.since:
            return False
        if self.kind:
            return entry["known"] and kind_of(entity) == self.kind
        return bool(entry["question"] == self.question)


@dataclass
class AnswerPoll(State):
    """The newest answer of each device, or of an even share of them if there are more than MAX_POLLED.

    The share is drawn by the names of devices, not by time: devices that report often, or late, weigh no more.
    """

    halvings: int = notes(int)
    answers: dict[str, list[Any]] = notes()  # device -> [time, answer]

    def add_answer(self, entity: str, time: int, answer: object) -> None:
        """Replaces the answer of a device."""
        if _is_sampled(entity, self.halvings):
            self.answers[entity] = [time, answer]
            while len(self.answers) > MAX_POLLED:
                self.halvings += 1
                self.answers = {e: known for e, known in self.answers.items() if _is_sampled(e, self.halvings)}

    def drop_expired(self, horizon: int) -> None:
        """Drops answers from before `horizon`."""
        self.answers = {e: known for e, known in self.answers.items() if known[0] >= horizon}

    def count_answers(self) -> dict[Any, int]:
        """Returns the number of devices by answer."""
        found: dict[Any, int] = {}
        for _, answer in self.answers.values():
            found[answer] = found.get(answer, 0) + 1
        return found

    def newest_time(self) -> int:
        """Returns the time of the newest answer; 0 without one."""
        return max((time for time, _ in self.answers.values()), default=0)


@dataclass
class KnownAnswerPoll(AnswerPoll):
    """Devices that gave the known answer recently (True), and those that failed within a day (False)."""

    def add_right(self, entity: str, time: int, recent: int) -> None:
        """Adds a right answer. recent: a wrong one from before then no longer counts."""
        before = self.answers.get(entity)
        if before is None or before[1] or before[0] < recent:
            self.add_answer(entity, time, True)

    def tally(self, same: int) -> tuple[int, int, bool]:
        """Returns wrong and right devices, and whether the program is broken: most fail it, on `same` or more nodes."""
        wrong = [e for e, (_, right) in self.answers.items() if not right]
        right = len(self.answers) - len(wrong)
        return len(wrong), right, len(wrong) > right and count_software(wrong) >= same


def _is_sampled(entity: str, halvings: int) -> bool:
    if not halvings:
        return True
    mixed = zlib.crc32(entity.encode()) * 0x9E3779B1 >> 12  # the product separates names that differ in one character
    return not mixed & ((1 << halvings) - 1)


def count_software(devices: Iterable[str]) -> int:
    """Returns how many of the devices may have software of their own: all cores of one node have the same."""
    return len({d.rpartition(".")[0] if kind_of(d) == "cpu" else d for d in devices})


@dataclass
class CanaryVotes(State):
    """The newest answers to each canary. They are bit-exact: there is nothing to learn and no noise.

    A canary without known answer is one question per version, SKU and driver: other software may round otherwise.
    rounds: question -> the devices by answer; where answers are known only the wrong ones.
    polls:  question without known answer -> what most answer.
    known:  version and kind of device -> devices that gave the known answers, and those that did not.
    mistakes: mismatches found since the last call to be the fault of software, not of a device.
    """

    rounds: dict[str, dict[str, Any]] = notes()
    polls: dict[str, AnswerPoll] = parts(AnswerPoll)
    known: dict[str, KnownAnswerPoll] = parts(KnownAnswerPoll)
    mistakes: list[FalseMismatch] = field(default_factory=list, init=False)

    def judge_results(self, events: Sequence[tuple[Event, str]], quorum: int, same: int) -> list[CanaryVerdict]:
        """Returns the verdicts that the results of an instant make possible, in order of time.

        events: each result with what devices must have in common to be compared, where no answer is known.
        All are counted before one is judged.
        """
        found: list[CanaryVerdict] = []
        asked: dict[str, dict[str, Any]] = {}
        for event, like in events:
            data, known = event.data, read_text(event.data.get("expected"))
            version, digest = read_word(data["version"]), read_word(data["digest"])
            if known == digest:
                self._known_poll(version, event.entity).add_right(event.entity, event.time, event.time - RECENT)
                of = (event.entity, event.time, True, read_word(data["canary"]), version, digest, known)
                found.append(CanaryVerdict(*of, 0, 0, True, read_facts(data)))
                continue
            key, held = self._find_round(event, known, like)
            poll = self._known_poll(version, event.entity) if known else self.polls.setdefault(key, AnswerPoll())
            poll.add_answer(event.entity, event.time, False if known else digest)
            self._count_vote(held, digest, event)
            held["waiting"].append([event.time, event.entity, digest, read_facts(data)])
            asked[key] = held
        for key, held in asked.items():
            by_known = bool(held["known"])
            found += self._judge_by_known(held, same) if by_known else self._judge_by_majority(key, held, quorum, same)
        return sorted(found, key=lambda v: (v.time, v.entity, v.canary, v.right))

    def _known_poll(self, version: str, entity: str) -> KnownAnswerPoll:
        return self.known.setdefault(f"{kind_of(entity)}|{version}", KnownAnswerPoll())

    def _find_round(self, event: Event, known: str, like: str) -> tuple[str, dict[str, Any]]:
        canary, version = read_word(event.data["canary"]), read_word(event.data["version"])
        key = f"{canary}|{version}|{known or like}"
        held = self.rounds.get(key)
        if held is None:
            held = {"canary": canary, "version": version, "known": known, "time": event.time}
            held |= {"votes": {}, "waiting": [], "split": False}
            self.rounds[key] = held
        held["time"] = max(held["time"], event.time)
        return key, held

    def _count_vote(self, held: dict[str, Any], digest: str, event: Event) -> None:
        """Keeps the newest voters of an answer, a device under one answer only."""
        votes: dict[str, dict[str, int]] = held["votes"]
        _add_voter(votes.setdefault(digest, {}), event)
        if len(votes) > 1:
            for other, voters in votes.items():
                if other != digest:
                    voters.pop(event.entity, None)
            if len(votes) > _MAX_ANSWERS_SPLIT:
                _drop_rare_answers(held, _MAX_ANSWERS_SPLIT)

    def _judge_by_known(self, held: dict[str, Any], same: int) -> list[CanaryVerdict]:
        """Returns verdicts on wrong answers where the right one is known."""
        waiting, held["waiting"] = held["waiting"], []
        version, recent = held["version"], held["time"] - RECENT
        states = {}
        for kind in sorted({kind_of(entity) for _, entity, _, _ in waiting}):
            poll = self.known[f"{kind}|{version}"]
            poll.drop_expired(recent)
            states[kind] = poll.tally(same)
            if states[kind][2]:  # most are wrong, each in its own way
                self.mistakes.append(FalseMismatch("broken", version, kind=kind, since=recent))
        self._log_split(held, any(s[2] for s in states.values()), sum(s[0] + s[1] for s in states.values()))
        found = []
        for time, entity, answer, facts in waiting:
            wrong, right, broken = states[kind_of(entity)]
            voters = held["votes"].get(answer, {})
            if not self._is_other_software(version, answer, voters, same) and not broken:
                of = (entity, time, False, held["canary"], version, answer, held["known"])
                found.append(CanaryVerdict(*of, wrong + right, right, True, facts))
        _drop_rare_answers(held, _MAX_ANSWERS_JUDGED)
        return found

    def _judge_by_majority(self, key: str, held: dict[str, Any], quorum: int, same: int) -> list[CanaryVerdict]:
        votes = self.polls[key].count_answers()
        most = min(votes, key=lambda d: (-votes[d], d))
        agreeing, total = votes[most], sum(votes.values())
        divided = total < quorum or 2 * agreeing <= total
        self._log_split(held, divided and total >= quorum, total)
        if divided:
            if held["split"]:
                since = held["time"] - RECENT
                self.mistakes.append(FalseMismatch("broken", held["version"], question=key, since=since))
            del held["waiting"][:-_MAX_WAITING]
            return []
        waiting, held["waiting"] = held["waiting"], []
        found, version = [], held["version"]
        for time, entity, answer, facts in waiting:
            right = answer == most
            voters = held["votes"].get(answer, {})
            if right or not self._is_other_software(version, answer, voters, same):
                of = (entity, time, right, held["canary"], version, answer, most)
                found.append(CanaryVerdict(*of, total, agreeing, False, facts, key))
        _drop_rare_answers(held, _MAX_ANSWERS_JUDGED)
        return found

    def _is_other_software(self, version: str, answer: str, voters: Mapping[str, int], same: int) -> bool:
        """Returns whether several give this wrong answer: defective devices do not agree to the bit."""
        if count_software(voters) < same:
            return False
        self.mistakes.append(FalseMismatch("shared", version, answer))
        return True

    def _log_split(self, held: dict[str, Any], split: bool, voters: int) -> None:
        """Logs once that no device can be judged."""
        if split and not held["split"]:
            what = "most devices fail its known answer" if held["known"] else "no answer has a majority"
            _log.warning(
                "canary %s %s, run by %d devices: %s; no device is blamed",
                held["canary"],
                held["version"],
                voters,
                what,
            )
        held["split"] = split

    def drop_expired(self, horizon: int) -> None:
        """Drops votes from before `horizon`, and canaries that no device runs any more."""
        for held in self.rounds.values():
            old = {d: v for d, v in held["votes"].items() if not v or next(iter(v.values())) < horizon}
            for answer, voters in old.items():
                held["votes"][answer] = {entity: time for entity, time in voters.items() if time >= horizon}
                if not held["votes"][answer]:
                    del held["votes"][answer]
        for key in sorted(self.rounds, key=lambda k: self.rounds[k]["time"])[:-_MAX_CANARIES]:
            del self.rounds[key]
        self.polls = {key: poll for key, poll in self.polls.items() if key in self.rounds}
        for poll in self.polls.values():
            poll.drop_expired(horizon)
        for key in sorted(self.known, key=lambda k: self.known[k].newest_time())[:-_MAX_CANARIES]:
            del self.known[key]

    def split_canaries(self) -> list[str]:
        """Returns the canaries on which devices are split, so that none can be judged by them."""
        return sorted({f"{held['canary']} {held['version']}" for held in self.rounds.values() if held["split"]})


def _add_voter(voters: dict[str, int], event: Event) -> None:
    """Adds a voter, and drops the one that voted longest ago."""
    voters.pop(event.entity, None)
    voters[event.entity] = event.time
    if len(voters) > _MAX_VOTERS:
        del voters[next(iter(voters))]


def _drop_rare_answers(held: dict[str, Any], answers: int) -> None:
    """Drops the rarest and oldest answers: years of single wrong ones must not outvote the right one."""
    votes: dict[str, dict[str, int]] = held["votes"]
    if len(votes) > answers:
        kept = sorted(votes, key=lambda d: (len(votes[d]), max(votes[d].values(), default=0)))[-answers:]
        held["votes"] = {d: voters for d, voters in votes.items() if d in kept}


def read_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a result has beside its digest, as far as it has the right type."""
    if _FACTS.isdisjoint(data):
        return {}
    found: dict[str, Any] = {k: v for k in _TEXTS if (v := read_word(data.get(k)))}
    for name in _COUNTS:
        value = read_integer(data.get(name), high=_MAX_ROUNDS)
        if value is not None:
            found[name] = value
    if isinstance(wrong := data.get("wrong"), (list, tuple)):
        found["wrong"] = [read_text(problem) for problem in wrong[:_MAX_PROBLEMS] if read_text(problem)]
    return found


def is_result(event: Event) -> bool:
    """Returns whether the event is the result of a canary; the driver reports programs that raised an error."""
    if kind_of(event.entity) not in ("gpu", "cpu"):
        return False
    if not all(read_word(event.data.get(k)) for k in ("canary", "version", "digest")):
        return False
    return not read_word(event.data["digest"]).startswith("raised ")


def read_word(value: object) -> str:
    """Returns a text, or a number as a text; "" for anything else."""
    return read_text(value) or ("" if (number := read_integer(value)) is None else str(number))
