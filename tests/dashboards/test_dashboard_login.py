"""Login at a real, certified provider, without a browser: PKCE, deep links, forged and revoked tokens, logout."""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey

from benchmarks.page_viewer import Run
from tests.dashboards.login_site import Site, cookies_of, running_site
from tests.oidc_provider import SECRET, log_in

pytestmark = pytest.mark.oidc
FLEET = "1 critical of 3 nodes"
"""Text that only a person with access sees."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One dashboard for all tests; the provider is asked every second."""
    with running_site(tmp_path_factory.mktemp("login"), oidc="check_seconds = 1") as made:
        yield made


def see_until(look: Callable[[], Run], found: Callable[[Run], bool]) -> Run:
    """Looks until the page is as expected: the next check is at most a second away."""
    deadline = time.monotonic() + 20
    while not found(run := look()):
        assert time.monotonic() < deadline, run.text[-2000:]
        time.sleep(0.1)
    return run


def test_without_a_login_a_page_shows_nothing_of_the_fleet_and_asks_the_api_nothing(site: Site) -> None:
    before = len(site.api.asked)
    for page, query in (("", ""), ("incidents", ""), ("incident", "id=A1"), ("detectors", ""), ("account", "")):
        run = site.see(None, page, query)
        assert "Log in to see the fleet." in run.text
        assert FLEET not in run.text
        assert run.exceptions == []
    assert len(site.api.asked) == before


def test_a_login_sends_pkce_state_and_nonce_and_leads_back_to_the_page_of_the_link(site: Site) -> None:
    browser, answer = site.begin_login("/incident?id=A1&live=0")
    asked = urllib.parse.parse_qs(urllib.parse.urlsplit(answer.headers["location"]).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert len(asked["code_challenge"][0]) == 43
    assert asked["state"]
    assert asked["nonce"]
    answer = log_in(browser, answer, "alice", f"{site.url}/oauth2callback")
    callback = answer.headers["location"]
    answer = browser.get(callback)
    assert answer.headers["location"] == "/incident?id=A1&live=0"
    run = site.see(browser, "incident", "id=A1&live=0")
    assert "rank" in run.text
    assert run.exceptions == []
    # the code and the address count once
    again = browser.get(callback)
    assert again.headers["location"] == "/"


def test_two_links_in_two_tabs_lead_to_their_pages(site: Site) -> None:
    browser, first = site.begin_login("/incident?id=A1")
    _, second = site.begin_login("/node?entity=node:n003", browser)
    for answer, page in ((first, "/incident?id=A1"), (second, "/node?entity=node:n003")):
        answer = log_in(browser, answer, "alice", f"{site.url}/oauth2callback")
        assert browser.get(answer.headers["location"]).headers["location"] == page


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("error=access_denied&error_description=<b>", "The provider did not allow it (access_denied)"),
        ("error=server_error", "The provider reported an error"),
        ("error=<script>", "The provider reported an error"),
        ("code=stale", "It took too long, or its page was opened twice"),
    ],
)
def test_a_login_that_failed_leads_back_and_says_why(site: Site, answer: str, said: str) -> None:
    browser, begun = site.begin_login("/incident?id=A1")
    asked = urllib.parse.parse_qs(urllib.parse.urlsplit(begun.headers["location"]).query)
    back = browser.get(f"{site.url}/oauth2callback?{answer}&state={asked['state'][0]}")
    assert back.headers["location"] == "/incident?id=A1"
    run = site.see(browser, "incident", "id=A1")
    assert "The login failed." in run.text
    assert said in run.text
    assert "Log in" in run.buttons
    assert FLEET not in run.text
    site.begin_login("/incident?id=A1", browser)  # the next try forgets it
    assert "The login failed." not in site.see(browser, "incident", "id=A1").text


def test_a_provider_that_does_not_answer_is_named_on_the_page(tmp_path: Path) -> None:
    with running_site(tmp_path, oidc='metadata_url = "http://127.0.0.1:9/metadata"') as site:
        browser, answer = site.begin_login("/incident?id=A1")
        assert (answer.status_code, answer.headers["location"]) == (303, "/incident?id=A1")
        run = site.see(browser, "incident", "id=A1")
        assert "The provider does not answer." in run.text
        assert "Log in" in run.buttons


def test_the_provider_refuses_a_login_without_pkce(site: Site) -> None:
    asked = {"client_id": "fleetpulse", "response_type": "code", "scope": "openid", "state": "s"}
    answer = httpx.get(
        f"{site.provider.url}/auth", params={**asked, "redirect_uri": f"{site.url}/oauth2callback"}, trust_env=False
    )
    assert "error=invalid_request" in answer.headers["location"]


@pytest.mark.parametrize(
    "referer",
    ["https://evil.example.org/incident", "//evil.example.org", "/auth/logout", "/oauth2callback", "/%0d%0aX:y", ""],
)
def test_a_link_of_another_site_or_of_the_login_itself_is_not_followed(site: Site, referer: str) -> None:
    browser, answer = site.begin_login("/")
    if not referer.startswith("/") or referer.startswith("//"):
        answer = browser.get(str(answer.request.url), headers={"Referer": referer or f"{site.url}"})
    else:
        answer = browser.get(str(answer.request.url), headers={"Referer": site.url + referer})
    answer = log_in(browser, answer, "alice", f"{site.url}/oauth2callback")
    found = browser.get(answer.headers["location"]).headers["location"]
    assert urllib.parse.urlsplit(found).netloc == ""
    assert not found.startswith("//")
    assert "\r" not in found
    assert found in ("/", "/%0d%0aX:y", "/%0D%0AX:y")


def test_a_write_is_sent_under_the_persons_name_and_a_viewer_can_send_none(site: Site) -> None:
    browser, _ = site.log_in("alice")
    site.api.posted_headers.clear()
    run = site.see(browser, "incident", "id=A1&live=0", click="Acknowledge")
    assert run.exceptions == []
    sent = site.api.posted_headers[-1]
    assert (sent["Fleetpulse-User"], sent["Fleetpulse-Role"]) == ("alice@example.org", "operator")
    assert sent["Fleetpulse-Subject"]
    assert sent["Fleetpulse-Subject"] != sent["Fleetpulse-User"]  # the provider's own, for the rule of two people
    assert "Fleetpulse-Client" not in sent  # Streamlit does not name this machine
    assert sent["Authorization"] == "Bearer fp_token-of-dashboard"
    site.api.incidents["A1"]["state"] = "open"
    viewer, _ = site.log_in("vera")
    site.api.posted_headers.clear()
    run = site.see(viewer, "incident", "id=A1&live=0")
    if "Acknowledge" in run.buttons:  # offered or not, it is refused
        run = site.see(viewer, "incident", "id=A1&live=0", click="Acknowledge")
    assert site.api.posted_headers == []


@pytest.mark.parametrize("name", ["nobody", "groupless"])
def test_groups_without_a_role_and_no_groups_give_no_access(site: Site, name: str) -> None:
    browser, _ = site.log_in(name)
    run = site.see(browser)
    assert "None of your groups has a role here" in run.text
    assert f"{name}@example.org" in run.text
    assert FLEET not in run.text
    assert "Log out" in run.buttons


def test_a_changed_group_counts_from_the_next_check(site: Site) -> None:
    browser, _ = site.log_in("root")
    assert "admin" in site.see(browser, "account").text
    try:
        site.provider.change_user("root", groups=["fp-view"])
        see_until(lambda: site.see(browser, "account"), lambda run: "viewer: read" in run.text)
        site.provider.change_user("root", groups=[])
        see_until(lambda: site.see(browser, "account"), lambda run: "None of your groups" in run.text)
    finally:
        site.provider.change_user("root", groups=["fp-admin"])


def access_token(browser: httpx.Client) -> str:
    """Returns the access token in the cookie of a login."""
    from streamlit.web.server.starlette.starlette_app_utils import decode_signed_value

    signed = cookies_of(browser)["_streamlit_user_tokens"]
    raw = decode_signed_value("a-secret-for-cookies-of-32-bytes", "_streamlit_user_tokens", signed)
    assert raw is not None
    return str(json.loads(raw)["access_token"])


def test_a_revoked_login_ends_at_the_next_check(site: Site) -> None:
    browser, _ = site.log_in("alice")
    assert FLEET in site.see(browser).text
    site.provider.revoke(access_token(browser))
    run = see_until(lambda: site.see(browser), lambda run: FLEET not in run.text)
    assert "The provider has ended this login" in run.text
    assert "Log in" in run.buttons


def test_a_forged_or_changed_cookie_is_no_login(site: Site) -> None:
    browser, _ = site.log_in("alice")
    good = cookies_of(browser)
    name = "_streamlit_user"
    for bad in (good[name][:-2] + "xx", "x" + good[name], good["_streamlit_user_tokens"], "", "e30.x.y"):
        run = site.see(site.new_browser({**good, name: bad}))
        assert "Log in to see the fleet." in run.text
        assert FLEET not in run.text


def test_a_login_that_ended_shows_no_more_data_in_a_page_that_stays_open(site: Site) -> None:
    import asyncio

    from benchmarks.page_viewer import Viewer

    browser, _ = site.log_in("alice")

    async def stay() -> Run:
        viewer = Viewer(site.url, cookies_of(browser))
        run = await viewer.open("", "")
        assert FLEET in run.text
        site.provider.revoke(access_token(browser))
        deadline = time.monotonic() + 20
        while "has ended this login" not in run.text:
            assert time.monotonic() < deadline
            run = await viewer.run("", "", fragment=run.fragments[0] if run.fragments else "", auto=True)
            await asyncio.sleep(0.1)
        await viewer.close()
        return run

    run = asyncio.run(stay())
    assert FLEET not in run.text
    assert run.exceptions == []


def test_logout_ends_the_login_here_and_at_the_provider(site: Site) -> None:
    browser, _ = site.log_in("alice")
    before = cookies_of(browser)
    assert site.see(browser, "account", click="Log out").login.startswith("/auth/logout")
    answer = browser.get(f"{site.url}/auth/logout")
    target = urllib.parse.urlsplit(answer.headers["location"])
    asked = urllib.parse.parse_qs(target.query)
    assert answer.headers["location"].startswith(f"{site.provider.url}/session/end")
    assert asked["id_token_hint"]
    assert asked["post_logout_redirect_uri"] == [f"{site.url}/oauth2callback"]
    assert "_streamlit_user" not in cookies_of(browser)
    form = browser.get(answer.headers["location"])
    fields = {"xsrf": form.text.partition('name="xsrf" value="')[2].partition('"')[0], "logout": "yes"}
    answer = browser.post(f"{site.provider.url}/session/end/confirm", data=fields)
    assert answer.headers["location"].startswith(f"{site.url}/oauth2callback")
    assert browser.get(answer.headers["location"]).headers["location"] == "/"
    # a copy of the cookies is worth nothing from the next check on: the provider has revoked the token
    copy = site.new_browser(before)
    see_until(lambda: site.see(copy), lambda run: FLEET not in run.text)


def test_login_cookies_are_for_scripts_unreadable_and_live_as_long_as_a_login(site: Site) -> None:
    browser, answer = site.begin_login("/")
    answer = log_in(browser, answer, "alice", f"{site.url}/oauth2callback")
    cookies = browser.get(answer.headers["location"]).headers.get_list("set-cookie")
    kept = [c for c in cookies if c.startswith("_streamlit_user")]
    assert len(kept) >= 2
    for cookie in kept:
        assert "httponly" in cookie.lower()
        assert "samesite=lax" in cookie.lower()
        assert "Max-Age=43200" in cookie
        assert "secure" not in cookie.lower()  # plain http on loopback


class Forger:
    """Metadata whose token endpoint is ours: asks the provider's and replaces the ID token by what `forge` makes."""

    def __init__(self, site: Site) -> None:
        self.site, self.url = site, ""
        self.forge: Callable[[dict[str, Any]], str | None] = lambda claims: None

    def metadata(self) -> dict[str, Any]:
        """The provider's, with our token endpoint."""
        found = httpx.get(f"{self.site.provider.url}/.well-known/openid-configuration", trust_env=False).json()
        return {**found, "token_endpoint": f"{self.url}/token"}

    def token(self, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        """The provider's answer with another ID token; without one if `forge` returns None."""
        answer = httpx.post(f"{self.site.provider.url}/token", content=body, headers=headers, trust_env=False)
        found: dict[str, Any] = answer.raise_for_status().json()
        claims = jwt.decode(found.pop("id_token"), self.site.provider.key).claims
        made = self.forge(claims)
        return found if made is None else {**found, "id_token": made}


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Forger]]:
    """A dashboard whose metadata comes from a forger."""
    state: list[Forger] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def answer(self, table: dict[str, Any]) -> None:
            body = json.dumps(table).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer(state[0].metadata())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept = {k: v for k, v in self.headers.items() if k.lower() in ("content-type", "authorization")}
            self.answer(state[0].token(body, kept))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    with running_site(tmp_path_factory.mktemp("forged"), oidc=f'metadata_url = "{url}/metadata"') as site:
        state.append(Forger(site))
        state[0].url = url
        yield site, state[0]
    server.shutdown()
    thread.join()
    server.server_close()


def sign(key: Any, claims: dict[str, Any], alg: str = "RS256") -> str:
    return str(jwt.encode({"alg": alg, "kid": "1"}, claims, key, algorithms=[alg]))


def unsigned(claims: dict[str, Any]) -> str:
    import base64

    parts = [json.dumps(part).encode() for part in ({"alg": "none"}, claims)]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."


FORGERIES: dict[str, Callable[[Site, dict[str, Any]], str | None]] = {
    "another key": lambda site, claims: sign(RSAKey.generate_key(2048, {"kid": "1"}), claims),
    "no signature": lambda site, claims: unsigned(claims),
    "the client's secret as key": lambda site, claims: sign(_secret_key(), claims, "HS256"),
    "expired": lambda site, claims: sign(site.provider.key, {**claims, "exp": int(time.time()) - 200}),
    "another audience": lambda site, claims: sign(site.provider.key, {**claims, "aud": "another"}),
    "another audience, ours as azp": lambda site, claims: sign(
        site.provider.key, {**claims, "aud": ["another"], "azp": "fleetpulse"}
    ),
    "another issuer": lambda site, claims: sign(site.provider.key, {**claims, "iss": "https://evil.example.org"}),
    "another nonce": lambda site, claims: sign(site.provider.key, {**claims, "nonce": "replayed"}),
    "from the future": lambda site, claims: sign(site.provider.key, {**claims, "iat": int(time.time()) + 4000}),
    "none at all": lambda site, claims: None,
}


def _secret_key() -> Any:
    from joserfc.jwk import OctKey

    return OctKey.import_key(SECRET)


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_id_token_is_no_login(forged: tuple[Site, Forger], kind: str) -> None:
    site, forger = forged
    forger.forge = lambda claims: FORGERIES[kind](site, claims)
    browser, _ = site.log_in("alice", "/incident?id=A1")
    run = site.see(browser)
    assert FLEET not in run.text
    assert "Log in" in run.buttons


def test_the_forger_without_a_forgery_is_a_login(forged: tuple[Site, Forger]) -> None:
    site, forger = forged
    forger.forge = lambda claims: sign(site.provider.key, claims)
    browser, _ = site.log_in("alice")
    assert FLEET in site.see(browser).text


def test_a_login_ends_when_its_tokens_expire(tmp_path: Path) -> None:
    lives = {"IdToken": 4, "AccessToken": 4}
    with running_site(tmp_path, ttl=lives, oidc="check_seconds = 1") as site:
        browser, _ = site.log_in("alice")
        assert FLEET in site.see(browser).text
        see_until(lambda: site.see(browser), lambda run: FLEET not in run.text)
