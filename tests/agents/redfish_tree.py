"""The documents of a Redfish double: a map path -> document with ETags and the resources that every service has."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

ROOT = "/redfish/v1"
SERVICE_UUID = "5e1f0d3c-88a1-4c0e-9a55-7f6f2f3f0b11"
SSE_URI = f"{ROOT}/EventService/SSE"
SESSIONS, ACCOUNTS = f"{ROOT}/SessionService/Sessions", f"{ROOT}/AccountService/Accounts"
SUBSCRIPTIONS, ROLES = f"{ROOT}/EventService/Subscriptions", f"{ROOT}/AccountService/Roles"
EVENT_TYPES = ["StatusChange", "ResourceUpdated", "ResourceAdded", "ResourceRemoved", "Alert"]
TOPS = ("Chassis", "Systems", "Managers", "ThermalEquipment", "PowerEquipment", "UpdateService", "TaskService")
Document = dict[str, Any]


def normal(path: str) -> str:
    """The path without a slash at its end."""
    return path.rstrip("/") or "/"


def collection(path: str, kind: str, members: list[str]) -> Document:
    return {
        "@odata.id": path,
        "@odata.type": f"#{kind}Collection.{kind}Collection",
        "Name": f"{kind} Collection",
        "Members": [{"@odata.id": f"{path}/{member}"} for member in members],
        "Members@odata.count": len(members),
    }


def walk(value: Any) -> Iterator[Document]:
    """Every object in a document, the document itself too."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def paths_of(loaded: Mapping[str, Any]) -> dict[str, Document]:
    """path -> document of a capture: such a map, a map by file name, or one document alone."""
    if "@odata.type" in loaded:
        loaded = {str(loaded.get("@odata.id", f"{ROOT}/Lone")): loaded}
    found: dict[str, Document] = {}
    for key, document in loaded.items():
        if isinstance(document, dict) and "@odata.id" in document | ({"@odata.id": key} if key.startswith("/") else {}):
            path = normal(key if key.startswith("/") else str(document["@odata.id"]))
            found[path] = {"@odata.id": path} | deepcopy(document)
    return found


@dataclass
class Tree:
    """Documents by path. Every change goes through `put`, `set` or `drop`, so that ETags are correct."""

    documents: dict[str, Document] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def from_capture(cls, loaded: Mapping[str, Any]) -> Tree:
        tree = cls()
        tree.documents.update(paths_of(loaded))
        tree.add_required_resources()
        return tree

    def get(self, path: str) -> Document | None:
        with self.lock:
            return deepcopy(self.documents.get(normal(path)))

    def put(self, path: str, document: Document) -> None:
        with self.lock:
            self.documents[normal(path)] = {"@odata.id": normal(path)} | document

    def merge(self, path: str, change: Document) -> None:
        """Applies a PATCH: objects are merged, all other values replaced."""

        def merge_into(old: Document, new: Document) -> None:
            for key, value in new.items():
                if isinstance(value, dict) and isinstance(old.get(key), dict):
                    merge_into(old[key], value)
                else:
                    old[key] = deepcopy(value)

        with self.lock:
            merge_into(self.documents[normal(path)], change)

    def set(self, path: str, pointer: str, value: Any) -> None:
        """Sets one value by JSON pointer, also in every excerpt that names this resource as its DataSourceUri."""
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.lstrip("/").split("/")]
        with self.lock:
            place: Any = self.documents[normal(path)]
            for part in way:
                place = place[int(part)] if isinstance(place, list) else place[part]
            place[int(last) if isinstance(place, list) else last] = value
            if not way:
                self._mirror(normal(path), last, value)

    def _mirror(self, path: str, name: str, value: Any) -> None:
        for document in self.documents.values():
            for part in walk(document):
                if name in part and normal(str(part.get("DataSourceUri", "/"))) == path:
                    part[name] = value

    def add(self, parent: str, name: str, document: Document) -> str:
        """A new member of a collection."""
        path = f"{normal(parent)}/{name}"
        with self.lock:
            self.put(path, document)
            self._set_members(parent, [*self.documents[normal(parent)]["Members"], {"@odata.id": path}])
        return path

    def drop(self, path: str) -> None:
        with self.lock:
            del self.documents[normal(path)]
            parent = normal(path).rpartition("/")[0]
            members = self.documents.get(parent, {}).get("Members", [])
            self._set_members(parent, [member for member in members if normal(member["@odata.id"]) != normal(path)])

    def _set_members(self, parent: str, members: list[Any]) -> None:
        self.documents[normal(parent)].update({"Members": members, "Members@odata.count": len(members)})

    def etag(self, path: str) -> str:
        with self.lock:
            written = json.dumps(self.documents[normal(path)], sort_keys=True, default=str).encode()
        return f'"{hashlib.sha256(written).hexdigest()[:16]}"'

    def targets(self) -> set[str]:
        """The targets of all actions of the resources."""
        with self.lock:
            parts = [part for document in self.documents.values() for part in walk(document)]
        return {str(part["target"]) for part in parts if "target" in part}

    def add_required_resources(self) -> None:
        """Adds root, sessions, accounts and events, where the capture lacks them or has another client's state."""
        self.put(ROOT, service_root(self.documents.get(ROOT, {}), set(self.documents)))
        for path, document in services().items():
            if path not in self.documents:
                self.put(path, document)
        for path in (SESSIONS, ACCOUNTS, SUBSCRIPTIONS):
            for old in [p for p in self.documents if p.startswith(f"{path}/")]:
                del self.documents[old]
            self._set_members(path, [])
        self.documents[f"{ROOT}/EventService"]["ServerSentEventUri"] = SSE_URI
        for name in TOPS:
            self._add_top_collection(f"{ROOT}/{name}")

    def _add_top_collection(self, path: str) -> None:
        """Adds a missing top collection whose members are in the capture."""
        below = sorted({p[len(path) + 1 :].split("/")[0] for p in self.documents if p.startswith(f"{path}/")})
        kind = {"Systems": "ComputerSystem", "Managers": "Manager", "Chassis": "Chassis"}.get(path.rsplit("/", 1)[1])
        if below and path not in self.documents and kind:
            self.put(path, collection(path, kind, below))
            for name in below:
                self._add_top_member(f"{path}/{name}", kind)

    def _add_top_member(self, path: str, kind: str) -> None:
        """Adds a missing top member whose subordinate resources are in the capture."""
        parts = {p[len(path) + 1 :] for p in self.documents if p.startswith(f"{path}/")}
        if path not in self.documents:
            links = {part: {"@odata.id": f"{path}/{part}"} for part in sorted(parts) if "/" not in part}
            head = {"@odata.type": f"#{kind}.v1_0_0.{kind}", "Id": path.rsplit("/", 1)[1], "Name": kind}
            self.put(path, head | links)


def service_root(known: Document, paths: set[str]) -> Document:
    """The captured root, or a default one, with links to the existing resources."""
    features = {
        "ExcerptQuery": False,
        "FilterQuery": False,
        "OnlyMemberQuery": True,
        "SelectQuery": True,
        "ExpandQuery": {"ExpandAll": True, "Levels": True, "Links": True, "NoLinks": True, "MaxLevels": 3},
    }
    root: Document = {
        "@odata.type": "#ServiceRoot.v1_17_0.ServiceRoot",
        "Id": "RootService",
        "Name": "Root Service",
        "RedfishVersion": "1.20.0",
        "UUID": SERVICE_UUID,
    }
    tops = [name for name in TOPS if any(path.startswith(f"{ROOT}/{name}") for path in paths)]
    links = {name: {"@odata.id": f"{ROOT}/{name}"} for name in ("SessionService", "AccountService", "EventService")}
    links |= {name: {"@odata.id": f"{ROOT}/{name}"} for name in tops}
    own = {
        "@odata.id": ROOT + "/",
        "ProtocolFeaturesSupported": features,
        "Links": {"Sessions": {"@odata.id": SESSIONS}},
    }
    return root | links | known | own


def services() -> dict[str, Document]:
    """SessionService, AccountService with its roles and EventService as this double has them."""
    enabled = {"ServiceEnabled": True, "Status": {"State": "Enabled", "Health": "OK"}}
    test = f"{ROOT}/EventService/Actions/EventService.SubmitTestEvent"
    found: dict[str, Document] = {
        f"{ROOT}/SessionService": {
            "@odata.type": "#SessionService.v1_1_9.SessionService",
            "Id": "SessionService",
            "Name": "Session Service",
            "SessionTimeout": 1800,
            "Sessions": {"@odata.id": SESSIONS},
        },
        f"{ROOT}/AccountService": {
            "@odata.type": "#AccountService.v1_15_0.AccountService",
            "Id": "AccountService",
            "Name": "Account Service",
            "MinPasswordLength": 8,
            "MaxPasswordLength": 64,
            "AccountLockoutThreshold": 0,
            "Accounts": {"@odata.id": ACCOUNTS},
            "Roles": {"@odata.id": ROLES},
        },
        f"{ROOT}/EventService": {
            "@odata.type": "#EventService.v1_10_1.EventService",
            "Id": "EventService",
            "Name": "Event Service",
            "DeliveryRetryAttempts": 3,
            "DeliveryRetryIntervalSeconds": 60,
            "EventFormatTypes": ["Event"],
            "RegistryPrefixes": ["ResourceEvent", "Environmental"],
            "ResourceTypes": ["LeakDetector", "Sensor"],
            "EventTypesForSubscription": EVENT_TYPES,
            "Subscriptions": {"@odata.id": SUBSCRIPTIONS},
            "Actions": {"#EventService.SubmitTestEvent": {"target": test}},
        },
    }
    found = {path: document | enabled for path, document in found.items()}
    found[SESSIONS] = collection(SESSIONS, "Session", [])
    found[ACCOUNTS] = collection(ACCOUNTS, "ManagerAccount", [])
    found[SUBSCRIPTIONS] = collection(SUBSCRIPTIONS, "EventDestination", [])
    found[ROLES] = collection(ROLES, "Role", list(PRIVILEGES))
    return found | {f"{ROLES}/{name}": role(name) for name in PRIVILEGES}


PRIVILEGES = {
    "Administrator": ["Login", "ConfigureManager", "ConfigureUsers", "ConfigureComponents", "ConfigureSelf"],
    "Operator": ["Login", "ConfigureComponents", "ConfigureSelf"],
    "ReadOnly": ["Login", "ConfigureSelf"],
}
"""The three predefined roles and their privileges (DSP0266, section 'Predefined roles')."""


def role(name: str) -> Document:
    return {
        "@odata.type": "#Role.v1_3_2.Role",
        "Id": name,
        "RoleId": name,
        "Name": f"{name} role",
        "IsPredefined": True,
        "AssignedPrivileges": PRIVILEGES[name],
    }
