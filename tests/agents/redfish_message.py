"""Requests and responses of a Redfish service, its errors, and links to schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.agents.redfish_tree import ROOT, Document, Tree, normal

JSON = "application/json; charset=utf-8"
METADATA = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b'<edmx:Edmx xmlns:edmx="http://docs.oasis-open.org/odata/ns/edmx" Version="4.0">'
    b'<edmx:Reference Uri="http://redfish.dmtf.org/schemas/v1/ServiceRoot_v1.xml">'
    b'<edmx:Include Namespace="ServiceRoot"/><edmx:Include Namespace="ServiceRoot.v1_17_0" Alias="Service"/>'
    b'</edmx:Reference><edmx:DataServices><Schema xmlns="http://docs.oasis-open.org/odata/ns/edm" Namespace="Service">'
    b'<EntityContainer Name="Service" Extends="ServiceRoot.v1_17_0.ServiceContainer"/></Schema></edmx:DataServices>'
    b"</edmx:Edmx>"
)


@dataclass
class Response:
    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    kind: str = JSON

    def encoded(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return b"" if self.body is None else json.dumps(self.body).encode()


@dataclass
class Request:
    """One request; the names of its headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def path(self) -> str:
        """The path; a collection's Members is the collection itself."""
        return normal(urlsplit(self.target).path).removesuffix("/Members")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))


def error(status: int, message: str, *args: str, **headers: str) -> Response:
    """An error in Redfish's format (DSP0266, section 'Error responses'); message: from its base registry."""
    info = {
        "@odata.type": "#Message.v1_2_1.Message",
        "MessageId": f"Base.1.18.{message}",
        "Message": f"{message}: {', '.join(args) or 'see MessageId'}.",
        "MessageArgs": list(args),
        "MessageSeverity": "Critical",
        "Resolution": "Correct the request and try again.",
    }
    body = {"error": {"code": info["MessageId"], "message": info["Message"], "@Message.ExtendedInfo": [info]}}
    return Response(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def schema(document: Document) -> str:
    """URL of the schema of a document's type."""
    words = str(document.get("@odata.type", "")).lstrip("#").split(".")
    return f"http://redfish.dmtf.org/schemas/v1/{'.'.join(words[:2] if len(words) > 2 else words[:1])}.json"


def odata(tree: Tree) -> Document:
    """The OData service document: a name and a URL for each link of the root."""
    root = tree.get(ROOT) or {}
    links = {name: part["@odata.id"] for name, part in root.items() if isinstance(part, dict) and "@odata.id" in part}
    value = [{"name": name, "kind": "Singleton", "url": url} for name, url in {"Service": ROOT + "/", **links}.items()]
    return {"@odata.context": f"{ROOT}/$metadata", "value": value}
