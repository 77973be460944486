"""Filters of the list of incidents: they live in the address, so that a bookmark or a link is a saved view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dashboards import routes

SHOWN: Mapping[str, str] = {
    "unresolved": "Unresolved",
    "pending": "Pending",
    "acknowledged": "Acknowledged",
    "silenced": "Silenced",
    "resolved": "Resolved",
    "all": "All",
}
"""Tabs of the list. Pending: nobody has acknowledged it. Silenced: by a person, or represented by another incident."""
SORTS: Mapping[str, str] = {
    "severity": "Severity",
    "newest": "Newest first",
    "oldest": "Oldest first",
    "members": "Most members",
    "confidence": "Confidence",
    "cause": "Cause",
    "detector": "Detector",
    "assignee": "Assignee",
}
GROUPS: Mapping[str, str] = {
    "": "No groups",
    "rack": "Rack",
    "node": "Node",
    "leaf": "Leaf switch",
    "rail": "Rail",
    "cdu": "CDU",
    "pdu": "PDU",
    "row": "Row",
    "job": "Job",
    "detector": "Detector",
    "cause": "Cause",
    "severity": "Severity",
}
PER_PAGE = 100
"""Incidents of a page. Chosen: what one scrolls through."""
_OLD_STATES = {"open": "pending", "muted": "silenced"}
"""States of incidents in older addresses -> tab."""


@dataclass(frozen=True, slots=True)
class ListQuery:
    """What the list shows. page: from 1."""

    show: str = "unresolved"
    text: str = ""
    matchers: tuple[str, ...] = ()
    assignee: str = ""
    sort: str = "severity"
    group: str = ""
    page: int = 1

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of the address; those with their default are left out."""
        default = ListQuery()
        pairs = {
            "state": self.show if self.show != default.show else "",
            "q": self.text,
            "filter": list(self.matchers),
            "assignee": self.assignee,
            "sort": self.sort if self.sort != default.sort else "",
            "group": self.group,
            "page": str(self.page) if self.page > 1 else "",
        }
        return {name: value for name, value in pairs.items() if value}

    def href(self, **changes: Any) -> str:
        """Returns the address with changes; a changed filter begins at the first page."""
        changed = replace(self, **({"page": 1} | changes))
        return routes.href("incidents", **changed.parameters())

    def api_parameters(self) -> dict[str, str | tuple[str, ...]]:
        """Returns the parameters of GET /api/v1/incidents."""
        found: dict[str, str | tuple[str, ...]] = {
            "show": self.show,
            "sort": self.sort,
            "labels": "true",
            "limit": str(PER_PAGE),
            "offset": str((self.page - 1) * PER_PAGE),
        }
        more: dict[str, str | tuple[str, ...]]
        more = {"q": self.text, "filter": self.matchers, "assignee": self.assignee, "group": self.group}
        return found | {name: value for name, value in more.items() if value}

    @property
    def is_filtered(self) -> bool:
        """Whether incidents of the tab may be left out."""
        return bool(self.text or self.matchers or self.assignee)


def parse_query(single: Mapping[str, str], matchers: list[str]) -> ListQuery:
    """Returns the filters of an address; unknown values are ignored."""
    show = _OLD_STATES.get(single.get("state", ""), single.get("state", ""))
    page = single.get("page", "1")
    return ListQuery(
        show=show if show in SHOWN else "unresolved",
        text=single.get("q", "").strip(),
        matchers=tuple(m for m in matchers if m.strip()),
        assignee=single.get("assignee", "").strip(),
        sort=single.get("sort", "") if single.get("sort") in SORTS else "severity",
        group=single.get("group", "") if single.get("group") in GROUPS else "",
        page=max(1, int(page)) if page.isdecimal() and len(page) < 7 else 1,
    )
