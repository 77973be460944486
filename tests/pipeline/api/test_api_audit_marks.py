"""The audit's chain and marks: which tampering the chain shows, and which only a mark kept elsewhere shows."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request

import pytest

import fleetpulse
from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Config, Store
from pipeline.incidents.audit import list_audit
from tests.pipeline.api.test_api_acts import Served


@pytest.fixture
def served(tmp_path, monkeypatch):
    made = Served(tmp_path, monkeypatch)
    made.patch = monkeypatch
    yield made
    made.close()


def verify(served, capsys, *words):
    """(exit code, what it says) of `fleetpulse audit verify`."""
    with served.patch.context() as patch:
        patch.setenv("FLEETPULSE_TOKEN", served.tokens["viewer"])
        code = fleetpulse.main(["audit", "verify", *words, "--config", str(served.file)])
    return code, capsys.readouterr().err


def write_rows(served):
    """Some rows; returns the mark of the newest."""
    for node in ("n03", "n11", "n19"):
        served.propose(node=node)
    return served.call("GET", "/audit?limit=1", token="viewer")[1]["newest"]


def rewrite(served):
    """Calculates all hashes again, as a person may who writes to the store."""
    cursor, previous = served.site.database.connection, ""
    rows = cursor.execute(
        """SELECT number, epoch_us(time), actor, role, origin, action, target, reason, outcome, before, after FROM audit
           ORDER BY number"""
    ).fetchall()
    for row in rows:
        text = json.dumps([previous, *row], separators=(",", ":"))
        previous = hashlib.sha256(text.encode()).hexdigest()
        cursor.execute("UPDATE audit SET hash = $1 WHERE number = $2", [previous, row[0]])


TAMPERED = {
    "a changed row": ("UPDATE audit SET actor = 'mallory' WHERE number = 3", "row 3 of the audit was changed"),
    "a removed row": ("DELETE FROM audit WHERE number = 3", "row 4 of the audit was changed"),
    "two rows that changed places": (
        "UPDATE audit SET number = CASE number WHEN 3 THEN 4 ELSE 3 END WHERE number IN (3, 4)",
        "row 3 of the audit was changed",
    ),
    "an added row": (
        "INSERT INTO audit SELECT 1000, time, actor, role, origin, action, target, reason, outcome, before, after, id, "
        "hash FROM audit WHERE number = 2",
        "row 1000 of the audit was changed",
    ),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("what", TAMPERED)
def test_the_chain_finds(what, served, capsys):
    write_rows(served)
    code, text = verify(served, capsys)
    assert (code, "is whole, rows 1 to" in text) == (0, True)
    statement, said = TAMPERED[what]
    served.site.database.connection.execute(statement)
    code, text = verify(served, capsys)
    assert (code, said in text) == (1, True), text


@pytest.mark.slow
def test_removed_newest_rows_are_found_by_a_mark_alone(served, capsys):
    mark = write_rows(served)
    assert verify(served, capsys, "--mark", mark)[0] == 0
    served.site.database.connection.execute("DELETE FROM audit WHERE number > 2")
    assert verify(served, capsys)[0] == 0, "the chain alone cannot find it"
    code, text = verify(served, capsys, "--mark", mark)
    assert (code, "the newest rows were removed" in text) == (1, True)


@pytest.mark.slow
def test_a_chain_that_was_calculated_again_is_found_by_a_mark_alone(served, capsys):
    mark = write_rows(served)
    served.site.database.connection.execute("UPDATE audit SET actor = 'mallory' WHERE number = 2")
    rewrite(served)
    assert verify(served, capsys)[0] == 0, "the chain alone cannot find it"
    code, text = verify(served, capsys, "--mark", mark)
    assert (code, "the audit was written again" in text) == (1, True)


@pytest.mark.slow
def test_a_mark_older_than_the_rows_that_are_kept_says_so_and_nonsense_is_refused(served, capsys):
    write_rows(served)
    served.site.database.connection.execute("DELETE FROM audit WHERE number < 4")
    code, text = verify(served, capsys, "--mark", f"2:{'0' * 64}")
    assert (code, "row 2 is older than the rows that are kept, from 4" in text) == (1, True)
    assert verify(served, capsys, "--mark", "latest")[0] == 2


def test_an_empty_audit_is_whole(served, capsys):
    assert verify(served, capsys) == (0, "fleetpulse: the audit is empty\n")


def test_without_any_token_nobody_proposes_an_act_and_the_attempt_is_a_row(served, tmp_path):
    config = Config(api=Api(port=0), store=Store(path=tmp_path / "none" / "store.duckdb"))
    server = start_server(create_app(served.backend, config, lambda: served.site.now), config, served.stop)
    url = f"http://127.0.0.1:{server.port}/api/v1"
    body = json.dumps({"verb": "hold", "targets": ["node:n03"], "reason": "x"}).encode()
    request = urllib.request.Request(f"{url}/acts", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value as answer:
        assert (answer.code, "acts need a token or a person" in answer.read().decode()) == (403, True)
    with urllib.request.urlopen(f"{url}/acts") as answer:
        assert json.loads(answer.read())["acts"] == []
    served.stop.set()
    server.join(5)
    newest = list_audit(served.site.database.connection)[0]
    assert (newest["actor"], newest["action"], newest["outcome"]) == ("local", "POST /api/v1/acts", "refused")
