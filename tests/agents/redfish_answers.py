"""The responses of a Redfish service: status, headers and body for each method and path, without any socket."""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.agents.redfish_message import METADATA, Request, Response, error, odata, schema
from tests.agents.redfish_query import answered_query
from tests.agents.redfish_tree import ACCOUNTS, ROLES, ROOT, SESSIONS, SUBSCRIPTIONS, Document, Tree

OPEN = {"/redfish", ROOT, f"{ROOT}/$metadata", f"{ROOT}/odata"}
"""Paths that need no login (DSP0266, section 'Resource and operation authentication requirements')."""
CREATES = {SESSIONS, ACCOUNTS, SUBSCRIPTIONS}
WRITABLE: Mapping[str, set[str]] = {
    "ManagerAccount": {"UserName", "Password", "RoleId", "Enabled", "Locked"},
    "SessionService": {"SessionTimeout", "ServiceEnabled"},
    "AccountService": {"AccountLockoutThreshold", "MinPasswordLength"},
    "Chassis": {"AssetTag", "LocationIndicatorActive"},
    "CoolingUnit": {"AssetTag"},
    "Control": {"SetPoint", "ControlMode"},
    "EventDestination": {"Context"},
}
"""Properties that PATCH may change, by type; the schemas allow more."""


@dataclass
class Session:
    token: str
    user: str
    used: float


@dataclass
class Service:
    """Sessions, accounts and documents of one service. `login` False: no authentication, all requests are permitted."""

    tree: Tree
    user: str = "operator"
    password: str = "wet-floor-17"
    login: bool = True
    session_life: float = 1800.0
    clock: Callable[[], float] = time.monotonic
    emit: Callable[[Document], None] = field(default=lambda _: None, repr=False)
    posted: list[tuple[str, Any]] = field(default_factory=list)
    """Actions and their bodies, in order."""
    sessions: dict[str, Session] = field(default_factory=dict)
    passwords: dict[str, str] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.passwords[self.user] = self.password
        self._add_account({"UserName": self.user, "RoleId": "Administrator"})

    def respond(self, request: Request) -> Response:
        """The complete response, with a body also for HEAD (the sender omits it)."""
        with self.lock:
            refused = self._refusal(request)
            response = refused or getattr(self, f"_{request.method.lower()}", self._unknown)(request)
        if request.method in ("GET", "HEAD"):
            response.headers.setdefault("Allow", ", ".join(self.allowed(request.path)))
        return response  # type: ignore[no-any-return]

    def user_of(self, headers: Mapping[str, str]) -> str | None:
        """The user by token or by name and password; None if unknown. Ends sessions that were unused too long."""
        now = self.clock()
        for path, session in [(p, s) for p, s in self.sessions.items() if now - s.used > self.session_life]:
            self._end_session(path, session)
        if token := headers.get("x-auth-token"):
            found = next((s for s in self.sessions.values() if secrets.compare_digest(s.token, token)), None)
            if found is not None:
                found.used = now
            return found.user if found is not None else None
        scheme, _, coded = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            name, _, password = base64.b64decode(coded, validate=True).decode().partition(":")
        except ValueError:
            return None
        return name if password and self.passwords.get(name) == password else None

    def allowed(self, path: str) -> list[str]:
        """The methods that a path allows."""
        document = self.tree.get(path)
        methods = ["GET", "HEAD"] if document is not None or path in OPEN else []
        if path in CREATES or path in self.tree.targets():
            methods.append("POST")
        if document is not None and writable(document):
            methods.append("PATCH")
        if path.rpartition("/")[0] in CREATES:
            methods.append("DELETE")
        return methods

    def _refusal(self, request: Request) -> Response | None:
        """A response 401, 404, 405 or 412, if the request must be refused."""
        path, method = request.path, request.method
        if request.headers.get("odata-version", "4.0") != "4.0":
            return error(412, "PreconditionFailed")
        free = (method in ("GET", "HEAD") and path in OPEN) or (method == "POST" and path == SESSIONS)
        stranger = self.login and self.user_of(request.headers) is None
        if stranger and (not free or ("x-auth-token" in request.headers and path not in OPEN)):
            return error(401, "NoValidSession", WWW_Authenticate='Basic realm="Redfish double"')
        allowed = self.allowed(path)
        if not allowed:
            return error(404, "ResourceMissingAtURI", path)
        if method not in allowed:
            return error(405, "OperationNotAllowed", Allow=", ".join(allowed))
        return None if free or self._is_permitted(request) else error(403, "InsufficientPrivilege")

    def _is_permitted(self, request: Request) -> bool:
        """Whether the user's role allows the request: only administrators write to resources of other users."""
        if not self.login or request.method in ("GET", "HEAD"):
            return True
        user, known = self.user_of(request.headers), self.tree.documents
        is_administrator = any(d.get("UserName") == user and d.get("RoleId") == "Administrator" for d in known.values())
        return is_administrator or known.get(request.path, {}).get("UserName") == user

    def _get(self, request: Request) -> Response:
        path = request.path
        if path == "/redfish":
            return Response(200, {"v1": ROOT + "/"})
        if path == f"{ROOT}/$metadata":
            return Response(200, METADATA, kind="application/xml; charset=utf-8")
        if path == f"{ROOT}/odata":
            return Response(200, odata(self.tree))
        document = self.tree.get(path)
        if document is None:
            return error(404, "ResourceMissingAtURI", path)
        try:
            shown = answered_query(self.tree, document, request.query)
        except NotImplementedError as unknown:
            return error(501, "QueryNotSupported", str(unknown))
        except ValueError as wrong:
            return error(400, "QueryParameterValueFormatError", str(wrong))
        etag = self.tree.etag(path)
        link = f"<{schema(document)}>; rel=describedby"
        headers = {"ETag": etag, "Link": link}
        if etag in [known.strip() for known in request.headers.get("if-none-match", "").split(",")]:
            return Response(304, None, headers)
        return Response(200, {"@odata.etag": etag} | shown if "Members" not in shown else shown, headers)

    _head = _get

    def _unknown(self, request: Request) -> Response:
        return error(501, "OperationNotAllowed", request.method)

    def _post(self, request: Request) -> Response:
        try:
            body = json.loads(request.body or b"{}")
        except ValueError:
            return error(400, "MalformedJSON")
        if not isinstance(body, dict):
            return error(400, "UnrecognizedRequestBody")
        if request.path == SESSIONS:
            return self._create_session(body)
        if request.path == ACCOUNTS:
            return self._create_account(body)
        if request.path == SUBSCRIPTIONS:
            return self._create_subscription(body)
        self.posted.append((request.path, body))
        if request.path.endswith("SubmitTestEvent"):
            self.emit(body)
        return Response(204)

    def _patch(self, request: Request) -> Response:
        path = request.path
        try:
            change = json.loads(request.body)
        except ValueError:
            return error(400, "MalformedJSON")
        if not isinstance(change, dict):
            return error(400, "UnrecognizedRequestBody")
        match = [known.strip() for known in request.headers.get("if-match", "*").split(",")]
        if match != ["*"] and self.tree.etag(path) not in match:
            return error(412, "PreconditionFailed")
        document = self.tree.get(path) or {}
        change = {name: value for name, value in change.items() if not name.startswith("@odata.")}
        if not change:
            return error(400, "NoOperation")
        if strange := [name for name in change if name not in document]:
            return error(400, "PropertyUnknown", *strange)
        if fixed := [name for name in change if name not in writable(document)]:
            return error(400, "PropertyNotWritable", *fixed)
        if password := change.pop("Password", None):
            self.passwords[str(document["UserName"])] = str(password)
        if "UserName" in change:
            self.passwords[str(change["UserName"])] = self.passwords.pop(str(document["UserName"]), "")
        self.tree.merge(path, change)
        return Response(200, self.tree.get(path), {"ETag": self.tree.etag(path)})

    def _delete(self, request: Request) -> Response:
        path, document = request.path, self.tree.get(request.path) or {}
        self.tree.drop(path)
        self.sessions.pop(path, None)
        if path.startswith(ACCOUNTS):
            self.passwords.pop(str(document.get("UserName")), None)
        return Response(204)

    def _create_session(self, body: Document) -> Response:
        name, password = body.get("UserName"), body.get("Password")
        if not isinstance(name, str) or not isinstance(password, str):
            return error(400, "PropertyMissing", "UserName", "Password")
        if self.login and self.passwords.get(name) != password:
            return error(401, "ResourceAtUriUnauthorized", SESSIONS)
        token, name_of_session = secrets.token_hex(16), secrets.token_hex(4)
        about = {"Id": name_of_session, "Name": "User Session", "UserName": name, "Password": None}
        path = self.tree.add(SESSIONS, name_of_session, about | {"@odata.type": "#Session.v1_7_0.Session"})
        self.sessions[path] = Session(token, name, self.clock())
        return Response(201, self.tree.get(path), {"Location": path, "X-Auth-Token": token})

    def _end_session(self, path: str, session: Session) -> None:
        del self.sessions[path]
        if self.tree.get(path) is not None:
            self.tree.drop(path)

    def _create_account(self, body: Document) -> Response:
        name, password = body.get("UserName"), body.get("Password")
        if not (isinstance(name, str) and isinstance(password, str) and name and len(password) >= 8):
            return error(400, "PropertyMissing", "UserName", "Password")
        if body.get("RoleId") not in {
            str(p).rsplit("/", 1)[1] for p in self.tree.documents if p.startswith(ROLES + "/")
        }:
            return error(400, "PropertyValueNotInList", "RoleId")
        if name in self.passwords:
            return error(400, "ResourceAlreadyExists", "ManagerAccount", "UserName", name)
        self.passwords[name] = password
        path = self._add_account(body)
        return Response(201, self.tree.get(path), {"Location": path, "ETag": self.tree.etag(path)})

    def _add_account(self, body: Document) -> str:
        name = secrets.token_hex(4)
        about = {"@odata.type": "#ManagerAccount.v1_12_1.ManagerAccount", "Id": name, "Name": "User Account"}
        about |= {
            "UserName": body["UserName"],
            "RoleId": body["RoleId"],
            "Password": None,
            "AccountTypes": ["Redfish"],
        }
        about |= {"Enabled": body.get("Enabled", True), "Locked": False}
        about["Links"] = {"Role": {"@odata.id": f"{ROLES}/{body['RoleId']}"}}
        return self.tree.add(ACCOUNTS, name, about)

    def _create_subscription(self, body: Document) -> Response:
        if not isinstance(body.get("Destination"), str) or body.get("Protocol") != "Redfish":
            return error(400, "PropertyMissing", "Destination", "Protocol")
        name = secrets.token_hex(4)
        about = {"@odata.type": "#EventDestination.v1_14_1.EventDestination", "Id": name, "Name": "Subscription"}
        path = self.tree.add(SUBSCRIPTIONS, name, about | {"Context": None, "SubscriptionType": "RedfishEvent"} | body)
        return Response(201, self.tree.get(path), {"Location": path})


def writable(document: Document) -> set[str]:
    return WRITABLE.get(str(document.get("@odata.type", "")).lstrip("#").split(".")[0], set())
