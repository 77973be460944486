"""Which incident counts the loss of a job that several incidents reach: it is named at the end of the text of the
effect, so that the loss of a job is counted once."""

from __future__ import annotations

_COUNTED = "; counted in "


def name_owner(basis: str, owner: str) -> str:
    """Returns the text of an effect with the incident that counts the loss."""
    return f"{basis}{_COUNTED}{owner}"


def find_owner(basis: str) -> str:
    """Returns the incident that counts the loss, empty if it is that of the text itself."""
    return basis.rpartition(_COUNTED)[2] if _COUNTED in basis else ""
