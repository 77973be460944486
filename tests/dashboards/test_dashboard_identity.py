"""Who may do what at the pages: roles, notes without a login, and checks of a login at the provider."""

from __future__ import annotations

import ast
import base64
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dashboards import answers, identity, oidc, snapshot
from dashboards.client import ApiError
from dashboards.identity import Person, Stranger
from pipeline.config.dashboard import Dashboard, Oidc, ProxyLogin
from pipeline.config.sections import Config, load_config
from pipeline.model.errors import ConfigError
from tests.dashboards.conftest import Api, mute_table

NOW = 1_790_000_000
DASHBOARDS = Path(identity.__file__).parent


class Idp:
    """A userinfo endpoint: `answer` is (status, claims); None: it hangs up. date: `Date` of its answers."""

    def __init__(self) -> None:
        self.answer: tuple[int, dict[str, Any]] | None = (200, {"sub": "a", "groups": ["ops"]})
        self.asked: list[str] = []
        self.described = 0
        self.url = ""
        self.date = formatdate(NOW, usegmt=True)


@pytest.fixture
def idp() -> Iterator[Idp]:
    """A provider's metadata and userinfo on loopback."""
    state = Idp()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def date_time_string(self, timestamp: float | None = None) -> str:
            return state.date

        def do_GET(self) -> None:
            if self.path.startswith("/.well-known/"):
                state.described += 1
                status, table = 200, {"userinfo_endpoint": f"{state.url}/me"}
            else:
                state.asked.append(self.headers["Authorization"])
                if state.answer is None:
                    return
                status, table = state.answer
            body = json.dumps(table).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    oidc.forget_logins()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()
    oidc.forget_logins()


@pytest.fixture
def settings(idp: Idp) -> Oidc:
    return Oidc(idp.url, "fleetpulse", Path("secret"))


def claims(settings: Oidc, **changes: Any) -> dict[str, Any]:
    """Returns what Streamlit keeps of a login at NOW, with an ID token of an hour."""
    known = {"is_logged_in": True, "iss": settings.issuer, "aud": "fleetpulse", "sub": "248289", "iat": NOW}
    known |= {"exp": NOW + 3600, "email": "alice@example.org", "email_verified": True, "tokens": {"access": "t1"}}
    return {**known, **changes}


def at(seconds: float) -> Callable[[], float]:
    return lambda: NOW + seconds


def test_a_login_has_the_groups_of_the_provider_and_ends_12_h_after_it_began(settings: Oidc) -> None:
    login = oidc.check(settings, claims(settings), at(0))
    assert login == oidc.Login("alice@example.org", ("ops",), NOW + 12 * 3600, "248289")
    assert oidc.check(settings, claims(settings), at(12 * 3600 - 1)) == login  # longer than the ID token
    ended = oidc.check(settings, claims(settings), at(12 * 3600))
    assert isinstance(ended, oidc.NoLogin)
    assert ended.barrier == "ended"


@pytest.mark.parametrize(
    ("changes", "barrier"),
    [
        ({"is_logged_in": False}, "logged_out"),
        ({"iat": None}, "refused"),
        ({"exp": None}, "refused"),
        ({"exp": "2999"}, "refused"),
        ({"iat": True}, "refused"),
        ({"sub": ""}, "refused"),
        ({"sub": "a\nb"}, "refused"),
        ({"iat": NOW + 3600}, "refused"),  # from the future
        ({"aud": "another"}, "refused"),
        ({"aud": ["another"], "azp": "fleetpulse"}, "refused"),  # Streamlit accepts this one
        ({"aud": None}, "refused"),
        ({"iss": "https://evil.example.org"}, "refused"),
    ],
)
def test_claims_that_are_not_for_this_dashboard_are_refused(
    settings: Oidc, idp: Idp, changes: dict[str, Any], barrier: str
) -> None:
    found = oidc.check(settings, claims(settings, **changes), at(0))
    assert isinstance(found, oidc.NoLogin)
    assert found.barrier == barrier
    assert idp.asked == []


def test_a_login_for_several_programs_counts(settings: Oidc) -> None:
    assert isinstance(oidc.check(settings, claims(settings, aud=["x", "fleetpulse"]), at(0)), oidc.Login)


def test_the_provider_is_asked_once_per_interval_and_its_groups_count_from_then_on(settings: Oidc, idp: Idp) -> None:
    for second in (0, 1, 299):
        assert oidc.check(settings, claims(settings), at(second)).groups == ("ops",)  # type: ignore[union-attr]
        idp.answer = (200, {"groups": "admins"})
    assert idp.asked == ["Bearer t1"]
    assert oidc.check(settings, claims(settings), at(300)).groups == ("admins",)  # type: ignore[union-attr]
    idp.answer = (200, {})
    assert oidc.check(settings, claims(settings), at(600)).groups == ()  # type: ignore[union-attr]
    assert idp.described == 1  # its metadata names the endpoint once, not at each check


def test_a_revoked_login_ends_at_the_next_check_and_stays_ended(settings: Oidc, idp: Idp) -> None:
    assert isinstance(oidc.check(settings, claims(settings), at(0)), oidc.Login)
    idp.answer = (401, {"error": "invalid_token"})
    assert isinstance(oidc.check(settings, claims(settings), at(299)), oidc.Login)
    assert isinstance(oidc.check(settings, claims(settings), at(300)), oidc.NoLogin)
    idp.answer = (200, {"groups": ["ops"]})
    assert isinstance(oidc.check(settings, claims(settings), at(9000)), oidc.NoLogin)


def jwt_until(expires: Any) -> str:
    """Returns an access token as Keycloak makes it; only its expiry is read."""
    part = base64.urlsafe_b64encode(json.dumps({"exp": expires, "typ": "Bearer"}).encode()).decode().rstrip("=")
    return f"e30.{part}.c2lnbmF0dXJl"


ODD = ("soon", True, -1, 10**400, float("inf"), float("nan"))
"""A value that is no time of expiry; Python's JSON has the last two."""
REFUSED = (401, {"error": "invalid_token", "error_description": "Token verification failed"})
"""What Keycloak answers for an expired token as for a revoked one."""


@pytest.mark.parametrize("groups_from", ["userinfo", "id_token"])
def test_a_login_outlives_its_access_token_for_an_hour(settings: Oidc, idp: Idp, groups_from: str) -> None:
    settings = replace(settings, groups_from=groups_from)
    user = claims(settings, exp=NOW + 300, tokens={"access": jwt_until(NOW + 300)}, groups=["ops"])
    assert oidc.check(settings, user, at(0)).until == NOW + 300 + 3600  # type: ignore[union-attr]
    assert isinstance(oidc.check(settings, user, at(200)), oidc.Login)
    idp.answer = REFUSED
    for second in (300, 301, 200 + 3599):
        assert oidc.check(settings, user, at(second)) == oidc.Login("alice@example.org", ("ops",), NOW + 3800, "248289")
    assert len(idp.asked) == 2, "an expired token is not sent"
    ended = oidc.check(settings, user, at(200 + 3600))
    assert isinstance(ended, oidc.NoLogin)
    assert "access token of this login has expired" in ended.reason


@pytest.mark.parametrize(("minutes", "hours", "last"), [(0, 12, 300), (10, 12, 600), (1440, 1, 3600)])
def test_the_life_after_the_token_is_configured_and_max_hours_ends_it(
    settings: Oidc, idp: Idp, minutes: float, hours: float, last: int
) -> None:
    settings = replace(settings, unchecked_minutes=minutes, max_hours=hours)
    user = claims(settings, tokens={"access": jwt_until(NOW + 300)})
    assert isinstance(oidc.check(settings, user, at(0)), oidc.Login)
    assert isinstance(oidc.check(settings, user, at(last - 1)), oidc.Login)
    assert isinstance(oidc.check(settings, user, at(last)), oidc.NoLogin)


@pytest.mark.parametrize("answer", [REFUSED, (200, {"groups": []})])
def test_a_short_token_is_checked_ever_more_often_until_it_expires(settings: Oidc, idp: Idp, answer: Any) -> None:
    """Keycloak's tokens and the default check_seconds, 300 s both: the login itself was the only check."""
    user = claims(settings, tokens={"access": jwt_until(NOW + 300)})
    asked = []
    for second in range(300):
        before = len(idp.asked)
        assert isinstance(oidc.check(settings, user, at(second)), oidc.Login)
        asked += [second] if len(idp.asked) > before else []
    assert asked == [0, 100, 167, 212, 242, 262, 275, 285, 295]
    oidc.forget_logins()
    assert isinstance(oidc.check(settings, user, at(0)), oidc.Login)
    idp.answer = answer
    for second in (200, 299, 301, 3000):
        assert getattr(oidc.check(settings, user, at(second)), "groups", ()) == ()


def test_a_long_token_is_checked_at_check_seconds(settings: Oidc, idp: Idp) -> None:
    user = claims(settings, tokens={"access": jwt_until(NOW + 12 * 3600)})
    for second in (0, 299, 300, 599, 600):
        oidc.check(settings, user, at(second))
    assert len(idp.asked) == 3


def test_short_tokens_are_named_once_in_the_log(settings: Oidc, capsys: pytest.CaptureFixture[str]) -> None:
    for life, unchecked in ((12 * 3600, 60.0), (300, 5.0)):  # noticed in time
        changed = replace(settings, unchecked_minutes=unchecked)
        assert isinstance(
            oidc.check(changed, claims(changed, tokens={"access": jwt_until(NOW + life)}), at(0)), oidc.Login
        )
    assert isinstance(oidc.check(settings, claims(settings), at(0)), oidc.Login)  # no JWT
    assert capsys.readouterr().err == ""
    for second in (0, 1):
        oidc.check(settings, claims(settings, tokens={"access": jwt_until(NOW + 300)}), at(second))
    said = capsys.readouterr().err
    assert said.count("dashboard: [dashboard.oidc] the provider's access tokens live 300 s") == 1
    assert "unchecked_minutes = 60" in said
    assert "Access Token Lifespan" in said


def test_a_token_that_is_refused_before_it_expires_is_a_revoked_login(settings: Oidc, idp: Idp) -> None:
    settings = replace(settings, check_seconds=60.0)
    user = claims(settings, tokens={"access": jwt_until(NOW + 300)})
    assert isinstance(oidc.check(settings, user, at(0)), oidc.Login)
    idp.answer = REFUSED
    for second in (120, 290, 301, 4000):  # and stays one after its expiry
        found = oidc.check(settings, user, at(second))
        assert isinstance(found, oidc.NoLogin)
        assert "has ended this login" in found.reason


@pytest.mark.parametrize(
    ("date", "counts"),
    [
        (NOW + 300, True),  # expired by the provider's clock
        (NOW + 305, True),
        (NOW + 299, False),
        (NOW + 306, False),  # more than EARLY_S ahead
        (None, False),
    ],
)
def test_a_refusal_a_moment_before_the_expiry_is_believed_unless_the_providers_clock_is_ahead(
    settings: Oidc, idp: Idp, date: float | None, counts: bool
) -> None:
    settings = replace(settings, check_seconds=60.0)
    user = claims(settings, tokens={"access": jwt_until(NOW + 300)})
    assert isinstance(oidc.check(settings, user, at(0)), oidc.Login)
    idp.answer, idp.date = REFUSED, "soon" if date is None else formatdate(date, usegmt=True)
    for second in (295, 301, 3000):
        assert isinstance(oidc.check(settings, user, at(second)), oidc.Login) == counts
    forbidden = claims(settings, tokens={"access": jwt_until(NOW + 299)})
    idp.answer = (403, {})
    assert isinstance(oidc.check(settings, forbidden, at(298)), oidc.NoLogin)


@pytest.mark.parametrize("groups_from", ["userinfo", "id_token"])
def test_an_expired_login_that_was_never_confirmed_is_none(settings: Oidc, idp: Idp, groups_from: str) -> None:
    """As after a restart of the dashboard: a copy of the cookies of a revoked login is worth nothing."""
    settings = replace(settings, groups_from=groups_from)
    user = claims(settings, exp=NOW + 36_000, tokens={"access": jwt_until(NOW + 300)}, groups=["ops"])
    assert isinstance(oidc.check(settings, user, at(0)), oidc.Login)
    idp.answer = REFUSED
    assert isinstance(oidc.check(settings, user, at(200)), oidc.NoLogin)
    oidc.forget_logins()
    for second in (300, 599, 30_000):
        found = oidc.check(settings, user, at(second))
        assert isinstance(found, oidc.NoLogin)
        assert "access token of this login has expired" in found.reason
    assert len(idp.asked) == 2


@pytest.mark.parametrize("token", ["opaque", "a.b", "a.b.c", "e30.!.c", "e30.MQ.c", *map(jwt_until, ODD)])
def test_of_a_token_without_an_expiry_a_refusal_ends_the_login(settings: Oidc, idp: Idp, token: str) -> None:
    user = claims(settings, tokens={"access": token})
    assert isinstance(oidc.check(settings, user, at(0)), oidc.Login)
    idp.answer = REFUSED
    assert isinstance(oidc.check(settings, user, at(300)), oidc.NoLogin)


@pytest.mark.parametrize("answer", [None, (500, {}), (302, {}), (200, [])])
def test_a_provider_that_does_not_answer_ends_logins_when_the_id_token_expires(
    settings: Oidc, idp: Idp, answer: Any
) -> None:
    assert isinstance(oidc.check(settings, claims(settings), at(0)), oidc.Login)
    idp.answer = answer
    assert oidc.check(settings, claims(settings), at(3599)).groups == ("ops",)  # type: ignore[union-attr]
    ended = oidc.check(settings, claims(settings), at(3600))
    assert isinstance(ended, oidc.NoLogin)
    assert "has expired" in ended.reason
    idp.answer = (200, {"groups": ["ops"]})
    assert isinstance(oidc.check(settings, claims(settings), at(3700)), oidc.Login)


def test_without_any_answer_nobody_has_groups(settings: Oidc, idp: Idp) -> None:
    idp.answer = None
    found = oidc.check(settings, claims(settings), at(0))
    assert isinstance(found, oidc.NoLogin)
    assert "groups are unknown" in found.reason
    from_token = replace(settings, groups_from="id_token")
    assert oidc.check(from_token, claims(settings, groups=["x", 7]), at(20)).groups == ("x",)  # type: ignore[union-attr]


def test_a_token_is_sent_only_to_https_or_loopback() -> None:
    with pytest.raises(ValueError, match="expected https"):
        oidc._fetch("http://id.example.org/me", "secret")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "alice@example.org"),
        ({"email_verified": False}, "248289"),  # anyone can claim an address
        ({"email": "a\nb"}, "248289"),
        ({"email": ["x"]}, "248289"),
        ({"email": ""}, "248289"),
    ],
)
def test_the_name_is_one_that_the_provider_vouches_for(settings: Oidc, changes: dict[str, Any], name: str) -> None:
    assert oidc.check(settings, claims(settings, **changes), at(0)).name == name  # type: ignore[union-attr]


@pytest.fixture
def log_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Person | Stranger], None]:
    """Sets who looks at the pages."""
    return lambda who: monkeypatch.setattr(identity, "current", lambda: who)


WRITES: dict[str, Callable[[], Any]] = {
    "write_note": lambda: snapshot.write_note("A1", "acknowledge", "x"),
    "add_mute": lambda: snapshot.add_mute("straggler", "rack:r1", 60.0, "x"),
    "end_mute": lambda: snapshot.end_mute("m0"),
    "send": lambda: snapshot.send(answers.parse_incident, "incidents/A1/assign", {"to": "ann"}),
}
STRANGERS = [Stranger("logged_out", "Log in."), Stranger("ended", "It ended."), Stranger("no_role", "None.", "eve")]
LOCAL = identity.current()  # before any test logs a person in
ALICE = Person("alice@example.org", "operator", client="10.1.2.3")


@pytest.mark.parametrize("who", [Person("vera", "viewer"), *STRANGERS])
@pytest.mark.parametrize("write", WRITES)
def test_a_viewer_and_a_stranger_write_nothing(api: Api, log_in: Any, who: Person | Stranger, write: str) -> None:
    log_in(who)
    with pytest.raises(ApiError) as caught:
        WRITES[write]()
    assert caught.value.status in (401, 403)
    assert api.posted == []


@pytest.mark.parametrize("write", WRITES)
def test_an_operator_writes_under_the_own_name(api: Api, log_in: Any, write: str) -> None:
    log_in(ALICE)
    api.mutes.append(mute_table("m0"))
    WRITES[write]()
    assert len(api.posted) == 1
    sent = api.posted_headers[0]
    assert (sent["Fleetpulse-User"], sent["Fleetpulse-Role"], sent["Fleetpulse-Client"]) == (
        "alice@example.org",
        "operator",
        "10.1.2.3",
    )


def test_every_function_that_writes_is_tried_above() -> None:
    """Those of snapshot.py that call `_writer`; and nothing else makes a client that writes."""
    tree = ast.parse((DASHBOARDS / "snapshot.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    writing = {f.name for f in functions if any(isinstance(n, ast.Name) and n.id == "_writer" for n in ast.walk(f))}
    assert writing - {"_writer"} == set(WRITES)
    for path in DASHBOARDS.rglob("*.py"):
        text = path.read_text()
        if path.name not in ("client.py", "snapshot.py"):
            assert "make_client(headers" not in text, path
            assert "Client(" not in text, path
            # a separate client only reads, and the page asks for access before
            assert "make_client" not in text or "snapshot.api_url()" in text, path
            assert ".send(" not in text or "snapshot.send(" in text, path


def test_without_a_login_everybody_writes_notes_and_nothing_else(api: Api, log_in: Any) -> None:
    log_in(LOCAL)
    assert identity.current() == Person("local", "operator", notes_only=True)
    for verb in ("acknowledge", "comment", "resolve"):
        snapshot.write_note("A1", verb, "x")  # type: ignore[arg-type]
    assert len(api.posted) == 3
    assert "Fleetpulse-User" not in api.posted_headers[0]
    refused: list[Callable[[], Any]] = [
        WRITES["add_mute"],
        WRITES["end_mute"],
        lambda: snapshot.write_note("A1", "not_a_fault", "x"),
        *(lambda p=path: snapshot.send(dict, p, {}) for path in ("silences", "maintenance", "incidents/A1/merge")),
        lambda: snapshot.send(dict, "budget/hot/reset", {}),
    ]
    for write in refused:
        with pytest.raises(ApiError) as caught:
            write()
        assert caught.value.status == 403
    assert len(api.posted) == 3


def test_only_an_admin_changes_settings(api: Api, log_in: Any) -> None:
    log_in(ALICE)
    assert not identity.may_write("nodes/n1/decommission")
    assert identity.may_write("silences")
    log_in(Person("root", "admin"))
    assert identity.may_write("nodes/n1/decommission")
    log_in(Person("vera", "viewer"))
    assert identity.may_write("sql")
    assert not identity.may_write("silences")


def test_the_highest_role_of_the_groups_counts_and_unknown_groups_give_none(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Dashboard(
        token_file=Path("t"), proxy_login=ProxyLogin("U", "G"), roles={"v": "viewer", "o": "operator", "a": "admin"}
    )
    monkeypatch.setattr(identity, "_BOARD", board)
    found = identity._with_role("ann", ("x", "o", "v"), None)
    assert isinstance(found, Person)
    assert (found.role, found.groups) == ("operator", ("o", "v"))
    assert isinstance(identity._with_role("ann", ("x", "O", ""), None), Stranger)


BASE = '[dashboard]\nroles = { "ops" = "operator" }\ntoken_file = "t"\n'
LOGIN = '[dashboard.oidc]\nissuer = "https://id.example.org"\nclient_id = "f"\nclient_secret_file = "s"\n'
PROXY = '[dashboard.proxy_login]\nuser_header = "U"\ngroups_header = "G"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOGIN, "roles: missing"),
        (BASE.replace('token_file = "t"\n', "") + LOGIN, "on-behalf-of"),
        (BASE, r"expected \[dashboard.oidc\]"),
        (BASE + LOGIN + PROXY, "expected one of them"),
        (BASE.replace("roles", 'host = "0.0.0.0"\nroles') + PROXY, "only the proxy may reach it"),
        (BASE + LOGIN.replace("https", "http"), "https"),
        (BASE + LOGIN + "max_hours = 25\n", "at most 24"),
        (BASE + LOGIN + "unchecked_minutes = -1\n", "minutes, 0 to 1440"),
        (BASE + LOGIN + "unchecked_minutes = 1441\n", "minutes, 0 to 1440"),
        (BASE.replace("operator", "boss") + LOGIN, "expected one of 'viewer', 'operator', 'admin'"),
        ('[dashboard]\nbase_path = "fleet/"\n', "begins with a slash"),
    ],
)
def test_settings_that_do_not_go_together_are_an_error(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "f.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(file, {})


def test_a_login_is_configured_in_one_table(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text(BASE + LOGIN)
    config: Config = load_config(file, {})
    assert config.dashboard.oidc is not None
    assert config.dashboard.roles == {"ops": "operator"}
    assert oidc.metadata_url(config.dashboard.oidc) == "https://id.example.org/.well-known/openid-configuration"
