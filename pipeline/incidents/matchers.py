"""Matchers over the labels of incidents, with the syntax and meaning of Alertmanager's.

A regular expression that only lists values (`node:a|node:b`) is compared as a set: a window of a whole system has
100,000 of them, of which RE2 could not make an expression.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.model.errors import UsageError
from pipeline.model.matcher_text import quote_value, unquote_value

MAX_MATCHERS, MAX_MATCHER_CHARACTERS = 20, 100_000
"""Of one silence; of a pattern or value that is no list. Chosen."""
MAX_LISTED = 100_000
"""Most values that a matcher lists: all nodes of the largest site. Chosen."""
SHOWN_CHARACTERS = 120
"""Characters of a longer value that people and the audit see, before the number of its values. Chosen: a line."""
Labels = Mapping[str, tuple[str, ...]]
_MATCHER = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*"|[^"]*?)\s*\Z', re.S)
_PLAIN = r"[^\\|.+*?()\[\]{}^$]|\\[!-/:-@\[-^`{-~ ]"
_LIST = re.compile(rf"(?:{_PLAIN}|\|)*", re.S)
_LISTED = re.compile(rf"((?:{_PLAIN})*)\|", re.S)
_SPECIAL = re.compile(r"[\\|.+*?()\[\]{}^$]")


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on one label. A missing label is empty; a label with several values matches if one of them does."""

    name: str
    value: str
    is_regex: bool = False
    is_equal: bool = True

    @property
    def values(self) -> frozenset[str] | None:
        """All values that it compares with; None if it is a pattern that is no list."""
        return list_values(self.value) if self.is_regex else frozenset((self.value,))

    def matches(self, labels: Labels) -> bool:
        """Returns whether the labels fulfil it."""
        found, listed = labels.get(self.name) or ("",), self.values
        fits = any(_fits(self.value, v) for v in found) if listed is None else not listed.isdisjoint(found)
        return fits == self.is_equal

    def holds(self, value: str) -> bool:
        """Returns whether the one value of the label fulfils it."""
        return self.matches({self.name: (value,)})

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{quote_value(self.value)}"

    @property
    def sign(self) -> str:
        """Its operator."""
        return ("=~" if self.is_regex else "=") if self.is_equal else ("!~" if self.is_regex else "!=")

    def shorten(self) -> str:
        """Returns it as text for people: of a long value the beginning, and how much it is."""
        return f"{self.name}{self.sign}{quote_value(self.short_value)}"

    @property
    def short_value(self) -> str:
        """The value; of one longer than SHOWN_CHARACTERS the beginning, and how many values or characters it has."""
        if len(self.value) <= SHOWN_CHARACTERS:
            return self.value
        start, listed = self.value[:SHOWN_CHARACTERS], self.values
        if listed is None or len(listed) == 1:
            return f"{start}… ({len(self.value):,} characters)"
        whole, bar, _ = start.rpartition("|")
        return f"{whole if bar else start + '…'}|… ({len(listed):,} values)"

    def as_json(self) -> dict[str, Any]:
        """Returns the matcher in the form of Alertmanager's API."""
        return {"name": self.name, "value": self.value, "isRegex": self.is_regex, "isEqual": self.is_equal}

    def as_facts(self) -> dict[str, Any]:
        """Returns the matcher for the audit: as `as_json`, with a long value shortened."""
        return {**self.as_json(), "value": self.short_value}

    def as_stored(self) -> dict[str, Any]:
        """Returns the matcher for the store. Versions that read at most MAX_MATCHER_CHARACTERS of a value find, of a
        longer list, one that matches nothing; `listed` has the values, and whether they match or all others."""
        if len(self.value) <= MAX_MATCHER_CHARACTERS:
            return self.as_json()
        plain = {"name": self.name, "value": self.short_value, "isRegex": False, "isEqual": True}
        return {**plain, "listed": {"value": self.value, "isEqual": self.is_equal}}


@functools.lru_cache(65_536)
def _fits(pattern: str, value: str) -> bool:
    """Returns whether a whole value matches an RE2 pattern, as in Alertmanager; its time is linear in the value."""
    return bool(pc.match_substring_regex(pa.scalar(value), f"^(?s:{pattern})$").as_py())


@functools.lru_cache(2048)
def list_values(pattern: str) -> frozenset[str] | None:
    """Returns the values of a pattern that only lists them, such as `r1|r\\.2`; None of any other pattern."""
    if _LIST.fullmatch(pattern) is None:
        return None
    found = pattern.split("|") if "\\" not in pattern else _LISTED.findall(pattern + "|")
    return frozenset(re.sub(r"\\(.)", r"\1", one, flags=re.S) if "\\" in one else one for one in found)


def make_list(name: str, values: Sequence[str]) -> Matcher:
    """Returns the matcher of a label with one of the values. Raises UsageError if there are too many."""
    if len(values) == 1:
        return Matcher(name, values[0])
    listed = "|".join(_SPECIAL.sub(r"\\\g<0>", value) for value in values)
    return check_matcher(Matcher(name, listed, is_regex=True))


def are_equal(some: Sequence[Matcher], others: Sequence[Matcher]) -> bool:
    """Returns whether matchers are the same, in whatever order and spelling they list their values."""
    mine, theirs = ([(m.name, m.is_equal, m.values or m.value) for m in every] for every in (some, others))
    return mine == theirs


def parse_matcher(given: str | Mapping[str, Any]) -> Matcher:
    """Returns the matcher of `rack=~"r1|r2"`, or of Alertmanager's JSON. Raises UsageError."""
    if isinstance(given, str):
        found = _MATCHER.match(given)
        if found is None:
            raise UsageError(f'matcher {given[:200]!r}: expected LABEL=VALUE, or != =~ !~, such as rack=~"r1|r2"')
        name, sign, text = found.groups()
        return check_matcher(Matcher(name, unquote_value(text), "~" in sign, not sign.startswith("!")))
    made = read_matcher(given)
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", made.name):
        raise UsageError(f"matcher name = {made.name[:200]!r}: expected letters, digits and _")
    return check_matcher(made)


def read_matcher(given: Mapping[str, Any]) -> Matcher:
    """Returns a matcher from the store as it was accepted, or of Alertmanager's JSON. Checks nothing."""
    listed = given.get("listed")
    if listed is not None:
        return Matcher(str(given["name"]), str(listed["value"]), is_regex=True, is_equal=bool(listed["isEqual"]))
    return Matcher(
        str(given["name"]), str(given["value"]), bool(given.get("isRegex")), bool(given.get("isEqual", True))
    )


def check_matcher(made: Matcher) -> Matcher:
    """Returns the matcher. Raises UsageError if its value is too long, lists too many, or is no RE2 pattern."""
    listed = made.values if made.is_regex else None
    if listed is not None:
        if len(listed) > MAX_LISTED:
            raise UsageError(f"matcher {made.name}: lists {len(listed):,} values, at most {MAX_LISTED:,}")
        return made
    if len(made.value) > MAX_MATCHER_CHARACTERS:
        raise UsageError(f"matcher {made.name}: longer than {MAX_MATCHER_CHARACTERS} characters")
    if made.is_regex:
        try:
            # by itself first: `a)|(?:b` is a pattern only within parentheses
            pc.match_substring_regex(pa.scalar(""), made.value)
            _fits(made.value, "")
        except pa.ArrowInvalid as error:
            raise UsageError(f"matcher {made.shorten()}: {error}") from error
    return made


def parse_matchers(given: Sequence[str | Mapping[str, Any]]) -> tuple[Matcher, ...]:
    """Returns matchers of which at least one does not match everything, as Alertmanager requires. Raises UsageError."""
    made = tuple(map(parse_matcher, given))
    if not made or len(made) > MAX_MATCHERS:
        raise UsageError(f"matchers: found {len(made)}, expected 1 to {MAX_MATCHERS}")
    if all(m.matches({}) for m in made):
        raise UsageError("matchers: all of them match an empty label, which silences everything; name a label")
    return made
