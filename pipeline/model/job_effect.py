"""The effect of an incident on a job in words: from its state, its slowdown and the text that explains them (`basis`).

`basis` begins with the doubt about its results, if there is one, and ends with the incident that counts the loss
(`loss_owner`), so that every table and page that has the text has both.
"""

from __future__ import annotations

from pipeline.model.loss_owner import describe_pace
from pipeline.model.records import from_iso, iso

_DOUBT, _UNKNOWN, _END = "results in doubt", "an unknown time", "; "
_WORDS = {"unaffected": "not affected", "unknown": "effect unknown"}


def name_doubt(basis: str, since: int | None) -> str:
    """Returns the text of an effect with since when the results are in doubt (us; 0: not known; None: they are not)."""
    if since is None:
        return basis
    known = f"{iso(since)[:19]}Z" if since else _UNKNOWN
    return f"{_DOUBT} since {known}{_END if basis else ''}{basis}"


def split_doubt(basis: str) -> tuple[str, str]:
    """Returns `results in doubt since TIME`, empty if they are not, and the rest of the text of an effect."""
    if not basis.startswith(_DOUBT):
        return "", basis
    doubt, _, rest = basis.partition(_END)
    return doubt, rest


def read_doubt(doubt: str) -> int | None:
    """Returns the time in the first part of `split_doubt` (us), 0 if it is not known; None without a doubt."""
    _, since, text = doubt.rpartition(" since ")
    if not since:
        return None
    return 0 if text == _UNKNOWN else from_iso(text)


def describe_effect(state: str, slowdown: float | None, basis: str) -> str:
    """Returns `31 % slower than before the onset: step time 1.92 s, was 1.47 s`, that it recovered, that its results
    are in doubt, or the state with what explains it."""
    doubt, rest = split_doubt(basis)
    if doubt and state in ("unaffected", "unknown"):
        return doubt
    if state == "slow" and slowdown is not None:
        text = describe_pace(f"{100 * slowdown:,.0f} % slower", rest)
    elif state == "unaffected" and slowdown is not None:
        text = describe_pace("not slower", rest)
    elif state == "ended" and rest:
        text = rest
    else:
        word = _WORDS.get(state, state)
        text = f"{word}: {rest}" if rest else word
    return f"{doubt}{_END}{text}" if doubt else text
