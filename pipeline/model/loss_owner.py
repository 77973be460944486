"""Which incident counts the loss of a job that several incidents reach: it is named at the end of the text of the
effect, so that the loss of a job is counted once."""

from __future__ import annotations

_COUNTED = "; counted in "
STEP_TIME, PAST = "step time ", " before the onset"


def name_owner(basis: str, owner: str) -> str:
    """Returns the text of an effect with the incident that counts the loss."""
    return f"{basis}{_COUNTED}{owner}"


def find_owner(basis: str) -> str:
    """Returns the incident that counts the loss, empty if it is that of the text itself."""
    return basis.rpartition(_COUNTED)[2] if _COUNTED in basis else ""


def drop_owner(basis: str) -> str:
    """Returns the text of an effect without the incident that counts the loss."""
    return basis.rpartition(_COUNTED)[0] if _COUNTED in basis else basis


def describe_pace(compared: str, basis: str) -> str:
    """Returns how a job runs against its own past: `not slower than before the onset: step time 1.02 s, was 1.01 s`.

    compared: `31 % slower` or `not slower`.   basis: the text of its effect, which may name what counts the loss.
    """
    measured = basis.partition(_COUNTED)[0].removesuffix(PAST)
    return f"{compared} than{PAST}" + (f": {measured}" if measured.startswith(STEP_TIME) else "")
