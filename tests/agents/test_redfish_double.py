"""The Redfish double works with DMTF's own clients, and has the configured faults."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agents.redfish_double import Double, Fault, Tree
from tests.agents.redfish_faults import redirect, refusal, wrong_types
from tests.agents.redfish_tree import ACCOUNTS, ROOT, SESSIONS, SSE_URI
from tests.agents.redfish_trees import CDU, CDU_CHASSIS, FLOW, LEAK, SHELF, TREES, cdu, shelf
from tests.parts import do_without


@pytest.fixture
def double() -> Iterator[Double]:
    with Double(cdu()) as made:
        yield made


Answered = tuple[int, dict[str, str], Any]


def send_request(double: Double, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answered:
    """Status, headers in lower case and the document; logged in unless a header says otherwise."""
    if "x_auth_token" not in headers and "authorization" not in headers:
        headers["authorization"] = "Basic " + b64encode(f"{double.user}:{double.password}".encode()).decode()
    with closing(http.client.HTTPConnection("127.0.0.1", double.port, timeout=10)) as line:
        sent = None if body is None else json.dumps(body)
        line.request(method, path, sent, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = line.getresponse()
        whole = answer.read()
        found = {name.lower(): value for name, value in answer.getheaders()}
        is_json = found.get("content-type", "").startswith("application/json")
        return answer.status, found, json.loads(whole) if whole and is_json else whole


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


# --- what it serves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_every_link_of_our_trees_leads_to_a_resource(name: str) -> None:
    tree = TREES[name]()
    words = {word for document in tree.documents.values() for word in json.dumps(document).split('"')[1:]}
    links = {word for word in words if word.startswith(f"{ROOT}/") and "/Actions/" not in word and word != SSE_URI}
    assert [link for link in sorted(links) if tree.get(link) is None] == []


def test_a_document_has_etag_version_and_allowed_methods(double: Double) -> None:
    status, headers, document = send_request(double, FLOW)
    assert (status, document["Reading"]) == (200, 324.0)
    assert headers["odata-version"] == "4.0"
    assert headers["allow"] == "GET, HEAD"
    assert send_request(double, FLOW, if_none_match=headers["etag"])[0] == 304
    double.set(FLOW, "/Reading", 12.5)
    assert send_request(double, FLOW, if_none_match=headers["etag"])[2]["Reading"] == 12.5


def test_a_changed_reading_is_in_every_excerpt(double: Double) -> None:
    double.set(FLOW, "/Reading", 77.0)
    double.set(LEAK, "/DetectorState", "Critical")
    connector = send_request(double, f"{CDU}/SecondaryCoolantConnectors/1")[2]
    assert connector["FlowLitersPerMinute"]["Reading"] == 77.0
    group = send_request(double, f"{CDU}/LeakDetection")[2]["LeakDetectorGroups"][0]
    assert [d["DetectorState"] for d in group["Detectors"]] == ["Critical", "OK"]


def test_head_has_headers_and_no_body(double: Double) -> None:
    status, headers, body = send_request(double, FLOW, "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 100


def test_expand_returns_members_and_pages_and_selection_work(double: Double) -> None:
    members = send_request(double, f"{CDU}/Pumps?$expand=.($levels=1)")[2]["Members"]
    assert [m["PumpSpeedPercent"]["Reading"] for m in members] == [62.0, 61.0]
    assert len(send_request(double, f"{CDU}/Pumps?$top=1")[2]["Members"]) == 1
    assert set(send_request(double, f"{FLOW}?$select=Reading")[2]) == {
        "@odata.etag",
        "@odata.id",
        "@odata.type",
        "Reading",
    }
    assert send_request(double, f"{CDU}/Pumps?$expand=sideways")[0] == 400
    assert send_request(double, f"{CDU}/Pumps?$filter=x")[0] == 501


def test_missing_and_forbidden_resources_return_redfish_errors(double: Double) -> None:
    for method, path, wanted in (("GET", f"{ROOT}/Nowhere", 404), ("DELETE", FLOW, 405), ("PATCH", FLOW, 405)):
        status, headers, body = send_request(double, path, method)
        assert status == wanted
        assert body["error"]["@Message.ExtendedInfo"][0]["MessageId"].startswith("Base.")
        assert status != 405 or headers["allow"] == "GET, HEAD"


def test_a_permitted_patch_is_kept() -> None:
    with Double(shelf()) as double:
        assert send_request(double, SHELF, "PATCH", {"AssetTag": "row 4"})[0] == 200
        assert send_request(double, SHELF)[2]["AssetTag"] == "row 4"
        assert send_request(double, SHELF, "PATCH", {"SerialNumber": "x"})[0] == 400
        assert send_request(double, SHELF, "PATCH", {"AssetTag": "x"}, if_match='"stale"')[0] == 412


def test_a_map_of_paths_and_a_lone_document_are_served() -> None:
    lone = {
        "@odata.type": "#LeakDetector.v1_0_0.LeakDetector",
        "@odata.id": f"{ROOT}/Chassis/B/L",
        "DetectorState": "OK",
    }
    loaded = {f"{ROOT}/Chassis/A": {"@odata.type": "#Chassis.v1_0_0.Chassis", "Id": "A"}, "notes.json": {"x": 1}}
    with Double(Tree.from_capture(loaded), login=False) as double:
        assert send_request(double, f"{ROOT}/Chassis")[2]["Members"] == [{"@odata.id": f"{ROOT}/Chassis/A"}]
        assert "Chassis" in send_request(double, ROOT)[2]
    with Double(Tree.from_capture(lone), login=False) as double:
        assert send_request(double, f"{ROOT}/Chassis/B/L")[2]["DetectorState"] == "OK"


# --- permissions-----------------------------------------------------------------------------------------------------


def test_unauthenticated_requests_get_401_except_at_the_root(double: Double) -> None:
    for path, wanted in ((ROOT, 200), ("/redfish", 200), (FLOW, 401), (SESSIONS, 401), (SSE_URI, 401)):
        status, headers, body = send_request(double, path, authorization="Basic bm9ib2R5Om5v")
        assert status == wanted
        if status == 401:
            assert headers["www-authenticate"].startswith("Basic")
            assert body["error"]["@Message.ExtendedInfo"]


def test_a_session_can_be_opened_used_and_deleted(double: Double) -> None:
    login = {"UserName": double.user, "Password": double.password}
    status, headers, _ = send_request(double, SESSIONS, "POST", login, authorization="")
    assert status == 201
    token, place = headers["x-auth-token"], headers["location"]
    assert send_request(double, FLOW, x_auth_token=token)[0] == 200
    assert send_request(double, place, "DELETE", x_auth_token=token)[0] == 204
    assert send_request(double, FLOW, x_auth_token=token)[0] == 401
    assert send_request(double, SESSIONS, "POST", {**login, "Password": "wrong"}, authorization="")[0] == 401


def test_an_unused_session_expires() -> None:
    now = [0.0]
    with Double(cdu(), session_life=30.0, clock=lambda: now[0]) as double:
        login = {"UserName": double.user, "Password": double.password}
        token = send_request(double, SESSIONS, "POST", login, authorization="")[1]["x-auth-token"]
        for _ in range(3):
            now[0] += 29.0
            assert send_request(double, FLOW, x_auth_token=token)[0] == 200
        now[0] += 31.0
        assert send_request(double, FLOW, x_auth_token=token)[0] == 401


def test_a_read_only_account_may_not_write(double: Double) -> None:
    about = {"UserName": "reader", "Password": "read-only-1", "RoleId": "ReadOnly"}
    assert send_request(double, ACCOUNTS, "POST", about)[0] == 201
    mine = "Basic " + b64encode(b"reader:read-only-1").decode()
    assert send_request(double, FLOW, authorization=mine)[0] == 200
    assert send_request(double, CDU_CHASSIS, "PATCH", {"AssetTag": "x"}, authorization=mine)[0] == 403


# --- events ----------------------------------------------------------------------------------------------------------


@contextmanager
def listening(double: Double, last: str = "") -> Iterator[http.client.HTTPResponse]:
    login = b64encode(f"{double.user}:{double.password}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", **({"Last-Event-ID": last} if last else {})}
    with closing(http.client.HTTPConnection("127.0.0.1", double.port, timeout=10)) as line:
        line.request("GET", SSE_URI, headers=headers)
        with line.getresponse() as answer:
            yield answer


def block(answer: http.client.HTTPResponse) -> list[str]:
    """The lines up to the next empty one."""
    lines = []
    while line := answer.readline().decode().rstrip("\n"):
        lines.append(line)
    return lines


def test_a_leak_is_sent_on_the_stream_with_its_number_and_origin(double: Double) -> None:
    with listening(double) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        until(lambda: bool(double.streams.listeners))
        double.set(LEAK, "/DetectorState", "Critical")
        number, data = block(answer)
        (event,) = json.loads(data.removeprefix("data: "))["Events"]
    assert number == "id: 1"
    assert event["OriginOfCondition"] == {"@odata.id": LEAK}
    assert event["MessageId"].endswith(".LeakDetectedCritical")
    until(lambda: double.streams.listeners == [] or not double.streams.emit({}))


def test_a_silent_stream_sends_comments_and_missed_events_can_be_requested(double: Double) -> None:
    double.streams.keep_alive = 0.05
    double.set(FLOW, "/Reading", 1.0)
    double.set(FLOW, "/Reading", 2.0)
    with listening(double, last="1") as answer:
        assert block(answer)[0] == "id: 2"
        assert block(answer)[0].startswith(":")
        double.streams.end_all()
        while answer.read(64):
            pass


def test_without_a_stream_there_is_none(double: Double) -> None:
    double.streams.on = False
    assert send_request(double, SSE_URI)[0] == 404


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_held_response_waits_and_others_do_not(double: Double) -> None:
    double.fault(FLOW, hold=threading.Event())
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(send_request(double, FLOW)[0]))
    waiting.start()
    until(lambda: double.in_flight == 1)
    assert send_request(double, LEAK)[0] == 200
    assert double.most_in_flight == 2
    assert found == []
    double.clear_fault(FLOW)
    waiting.join(5)
    assert found == [200]


def test_a_delay_is_kept_and_closing_does_not_wait_for_it() -> None:
    began = time.monotonic()
    with Double(cdu()) as double:
        double.fault(FLOW, delay=0.2)
        assert send_request(double, FLOW)[0] == 200
        assert time.monotonic() - began >= 0.2
        double.fault(FLOW, delay=180.0)
        lost: list[type] = []

        def wait() -> None:
            try:
                send_request(double, FLOW)
            except (OSError, http.client.HTTPException) as error:
                lost.append(type(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: double.in_flight == 1)
    waiting.join(5)
    assert len(lost) == 1
    assert time.monotonic() - began < 5


def test_a_connection_breaks_in_the_middle_or_before_the_first_byte(double: Double) -> None:
    double.fault(FLOW, drop=0.5)
    with pytest.raises(http.client.IncompleteRead):
        send_request(double, FLOW)
    double.fault(FLOW, drop=0.0)
    with pytest.raises(http.client.RemoteDisconnected):
        send_request(double, FLOW)
    double.clear_fault()
    assert send_request(double, FLOW)[0] == 200


def test_bodies_are_truncated_corrupted_inflated_and_slowed(double: Double) -> None:
    double.fault(FLOW, truncate=0.5)
    with pytest.raises(json.JSONDecodeError):
        send_request(double, FLOW)
    double.fault(FLOW, mangle=wrong_types)
    assert send_request(double, FLOW)[2]["Reading"] == "324.0 or so"
    double.fault(FLOW, pad=5_000_000)
    assert int(send_request(double, FLOW)[1]["content-length"]) > 5_000_000
    double.fault(FLOW, body=b"not json at all")
    with pytest.raises(json.JSONDecodeError):
        send_request(double, FLOW)
    began = time.monotonic()
    double.fault(FLOW, drip=0.01)
    assert send_request(double, FLOW)[0] == 200
    assert time.monotonic() - began > 0.1


def test_refusals_redirects_and_transient_faults(double: Double) -> None:
    double.fault(FLOW, refusal(503, "7"))
    status, headers, body = send_request(double, FLOW)
    assert (status, headers["retry-after"]) == (503, "7")
    assert "error" in body
    double.fault(FLOW, redirect("http://127.0.0.1:9/elsewhere"))
    assert send_request(double, FLOW)[1]["location"] == "http://127.0.0.1:9/elsewhere"
    double.fault(f"{CDU}/*", Fault(status=500, times=2))
    assert [send_request(double, LEAK)[0] for _ in range(3)] == [500, 500, 200]


def test_requests_are_recorded(double: Double) -> None:
    send_request(double, f"{FLOW}?$select=Reading")
    send_request(double, FLOW)
    assert [record.target for record in double.requests_for(FLOW)] == [f"{FLOW}?$select=Reading", FLOW]
    until(lambda: [seen.status for seen in double.requests] == [200, 200])


# --- DMTF's clients --------------------------------------------------------------------------------------------------


@pytest.fixture
def secure(certificate: Path) -> Iterator[Double]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with Double(cdu(), tls=context) as made:
        yield made


def test_over_tls_a_trusting_client_reads_and_a_plain_client_gets_nothing(secure: Double, certificate: Path) -> None:
    trusting = ssl.create_default_context(cafile=certificate)
    with urllib.request.urlopen(secure.url + ROOT, timeout=10, context=trusting) as answer:
        assert json.load(answer)["RedfishVersion"]
    with pytest.raises((OSError, http.client.HTTPException)):
        send_request(secure, ROOT)


def tool(name: str) -> str:
    """A program of DMTF's, from the folder into which deploy/parts.sh puts them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = sorted((cache / "fleetpulse" / "redfish").glob(f"*/bin/{name}"))
    if not found:
        do_without("redfish", f"no {name} of DMTF: run 'make parts'")
    return str(found[-1])


@pytest.mark.redfish
def test_the_library_of_dmtf_logs_in_and_reads(secure: Double) -> None:
    program = (
        "import sys, redfish\n"
        "c = redfish.redfish_client(base_url=sys.argv[1], username=sys.argv[2], password=sys.argv[3])\n"
        "c.login(auth='session'); print(c.get(sys.argv[4]).dict['Reading']); c.logout()"
    )
    words = [tool("python"), "-c", program, secure.url, secure.user, secure.password, FLOW]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "324.0\n", ran.stderr
    assert secure.service.sessions == {}


@pytest.mark.redfish
@pytest.mark.parametrize(("state", "wanted"), [("OK", "All detectors: OK"), ("Critical", "Critical")])
def test_the_tool_of_dmtf_lists_the_leak_detectors(secure: Double, state: str, wanted: str) -> None:
    secure.set(LEAK, "/DetectorState", state)
    login = ["-r", secure.url, "-u", secure.user, "-p", secure.password]
    words = [tool("python"), tool("rf_thermal_equipment.py"), *login, "leakdetectors", "-t", "CDU"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert wanted in ran.stdout, ran.stderr
    assert "Tray" in ran.stdout


@pytest.mark.redfish
@pytest.mark.slow
def test_the_protocol_validator_of_dmtf_finds_no_failure(secure: Double, certificate: Path, tmp_path: Path) -> None:
    words = [tool("rf_protocol_validator"), "-r", secure.url, "-u", secure.user, "-p", secure.password]
    words += ["--avoid-http-redirect", "--report-type", "tsv", "--report-dir", str(tmp_path)]
    environ = {**os.environ, "REQUESTS_CA_BUNDLE": str(certificate)}
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environ)
    (report,) = tmp_path.glob("*.tsv")
    verdicts = [line.split("\t")[4] for line in report.read_text().splitlines() if line.count("\t") >= 5]
    assert verdicts.count("FAIL") == 0, report.read_text()
    assert verdicts.count("PASS") >= 300, ran.stdout
