"""A real, certified OpenID Connect provider for tests: oidc-provider of npm, which `make parts` installs."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from joserfc.jwk import RSAKey

from tests.oidc_build import folder
from tests.parts import do_without

SECRET = "a-secret-of-the-client"
USERS: Mapping[str, Mapping[str, Any]] = {
    "alice": {"name": "Alice", "email": "alice@example.org", "email_verified": True, "groups": ["fp-ops", "staff"]},
    "bob": {"name": "Bob", "email": "bob@example.org", "email_verified": True, "groups": ["fp-ops"]},
    "root": {"name": "Root", "email": "root@example.org", "email_verified": True, "groups": ["fp-admin"]},
    "vera": {"name": "Vera", "email": "vera@example.org", "email_verified": True, "groups": ["fp-view"]},
    "nobody": {"name": "Nobody", "email": "nobody@example.org", "email_verified": True, "groups": ["staff"]},
    "groupless": {"name": "Groupless", "email": "groupless@example.org", "email_verified": True},
}
ROLES = {"fp-view": "viewer", "fp-ops": "operator", "fp-admin": "admin"}


@dataclass(frozen=True)
class Provider:
    """A running provider: its address and the file with its users, which a test may change."""

    url: str
    users: Path
    key: RSAKey

    def change_user(self, name: str, **claims: Any) -> None:
        """Changes claims of a user from now on."""
        known = json.loads(self.users.read_text())
        draft = self.users.with_suffix(".new")
        draft.write_text(json.dumps({**known, name: {**known[name], **claims}}))
        draft.replace(self.users)

    def revoke(self, token: str) -> None:
        """Revokes a token (RFC 7009)."""
        body = {"token": token, "client_id": "fleetpulse", "client_secret": SECRET}
        httpx.post(f"{self.url}/token/revocation", data=body).raise_for_status()


@contextmanager
def running_provider(at: Path, port: int, redirects: list[str], **ttl: int) -> Iterator[Provider]:
    """Runs a provider until the block ends. redirects: addresses of the dashboards' callbacks. ttl: in s."""
    if shutil.which("node") is None or not (folder() / "node_modules" / "oidc-provider").is_dir():
        do_without("oidc", "no node or no oidc-provider: run 'make parts'")
    at.mkdir(parents=True, exist_ok=True)
    users, settings, key = at / "users.json", at / "settings.json", RSAKey.generate_key(2048, {"kid": "1"})
    users.write_text(json.dumps(USERS))
    given = {"redirect_uris": redirects, "secret": SECRET, "ttl": ttl, "users": str(users)}
    settings.write_text(json.dumps({**given, "jwks": {"keys": [{**key.as_dict(private=True), "use": "sig"}]}}))
    program = Path(__file__).with_suffix(".mjs")
    command = ["node", "--no-warnings", str(program), str(folder()), str(port), str(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = ""
        while "ready" not in line:  # the first lines warn that interactions are for development
            line = process.stdout.readline()
            assert line, "the provider ended at its start"
        try:
            yield Provider(f"http://127.0.0.1:{port}", users, key)
        finally:
            process.terminate()


def log_in(browser: httpx.Client, answer: httpx.Response, name: str, stop: str) -> httpx.Response:
    """Goes through the provider's forms as a browser would, from its first redirect to the redirect to `stop`.

    Cookies of the provider and of the dashboard are kept apart by port, as ports share cookies.
    """
    for _ in range(12):
        if answer.is_redirect:
            target = urllib.parse.urljoin(str(answer.url), answer.headers["location"])
            if target.startswith(stop):
                return answer
            answer = browser.get(target)
            continue
        form = re.search(r'<form[^>]*action="([^"]+)"', answer.text)
        assert form, (answer.status_code, answer.text[:500])
        fields = dict(re.findall(r'name="(\w+)"[^>]*value="([^"]*)"', answer.text))
        if "login" in re.findall(r'name="(\w+)"', answer.text):
            fields |= {"login": name, "password": "any"}
        answer = browser.post(urllib.parse.urljoin(str(answer.url), html.unescape(form[1])), data=fields)
    raise AssertionError("the provider does not lead back")
