"""Parts of the demo and of `fleetpulse up`: a configuration, a receiver, and supervision of children."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import demo
from pipeline.config.receivers import Notify, Webhook
from pipeline.config.sections import Agent, Api, Config, Dashboard, Store, load_config
from pipeline.runtime.supervise import Supervisor


def test_the_demo_keeps_its_state_in_its_folder_and_sends_no_pages(tmp_path: Path) -> None:
    """Settings that lead out of the folder are dropped: store, spool, receivers, transport."""
    mine = Config(
        agent=Agent(node="host1", interval=2.0),
        api=Api(port=9001),
        dashboard=Dashboard(port=9002),
        store=Store(path=Path("/srv/real.duckdb")),
        notify=Notify(webhooks=(Webhook("oncall", "https://pages.example/x"),)),
    )
    path = tmp_path / "fleetpulse.toml"
    path.write_text(demo.demo_configuration(mine, tmp_path, 4242))
    found = load_config(path, {})
    assert (found.agent, found.api.port, found.dashboard.port) == (mine.agent, 9001, 9002)
    assert (found.store.path, found.spool.directory) == (tmp_path / "store.duckdb", tmp_path / "spool")
    assert [hook.url for hook in found.notify.webhooks] == ["http://127.0.0.1:4242/"]
    assert (found.site.name, found.pipeline.transport) == ("demo", "spool")


def test_variables_that_lead_out_of_the_folder_do_not_reach_the_children() -> None:
    given = {
        "PATH": "/bin",
        "FLEETPULSE__API__PORT": "1",
        "FLEETPULSE__DASHBOARD__PORT": "2",
        "FLEETPULSE__STORE__PATH": "/srv/real.duckdb",
        "FLEETPULSE__PIPELINE__TRANSPORT": "kafka",
        "FLEETPULSE_CONFIG": "/etc/fleetpulse.toml",
    }
    assert set(demo.strip_overrides(given)) == {"PATH", "FLEETPULSE__API__PORT", "FLEETPULSE__DASHBOARD__PORT"}


def alert(entity: str, status: str = "firing", **labels: str) -> dict[str, Any]:
    own = {"alertname": "LinkDegraded", "severity": "critical", "entity": entity, **labels}
    return {"status": status, "labels": own, "annotations": {"summary": "port flaps"}}


def test_an_alert_is_one_line_that_marks_simulated_alerts() -> None:
    assert demo.format_alert(alert("port:sim-n1.0")) == (
        "ALERT SIMULATED FIRING critical LinkDegraded port:sim-n1.0: port flaps"
    )
    assert (
        demo.format_alert(alert("port:n1.0", "resolved"))
        == "ALERT RESOLVED critical LinkDegraded port:n1.0: port flaps"
    )
    assert "SIMULATED" in demo.format_alert(alert("job:81", simulated="true"))


def test_a_line_break_in_an_alert_does_not_make_two_lines() -> None:
    broken = alert("port:n1.0")
    broken["annotations"]["summary"] = "one\ntwo\x1b[31m"
    assert demo.format_alert(broken).endswith("one two [31m")


def post_body(port: int, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/", body)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_the_receiver_prints_each_alert_and_refuses_other_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    body = json.dumps({"version": "4", "alerts": [alert("port:sim-a"), alert("port:b", "resolved")]}).encode()
    with demo.serve_receiver() as port:
        assert post_body(port, body) == 200
        assert [post_body(port, bad) for bad in (b"no json", b"[]", b"{}", b'{"alerts": [1]}')] == [400] * 4
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "ALERT SIMULATED FIRING critical LinkDegraded port",
        "ALERT RESOLVED critical LinkDegraded port",
    ]


def test_the_log_is_bounded_and_detects_when_the_history_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "LOG_BYTES", 100)
    log = demo.LogFile(tmp_path / "log")
    for _ in range(50):
        log("agent: a line of the agent")
    assert not log.backfilled
    log(f"agent: {demo.BACKFILLED}")
    assert not log.backfilled
    log(f"simulator: simulate: {demo.BACKFILLED}: 12 samples")
    assert log.backfilled
    assert (tmp_path / "log").stat().st_size < 150


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Config, Sequence[str], Mapping[str, str]]:
    """A fake command: its agent and its simulator exit immediately, its other parts wait."""
    program = tmp_path / "command.py"
    program.write_text(
        "import sys, time\nsys.exit('no spool') if sys.argv[1] in ('agent', 'simulate') else time.sleep(600)\n"
    )
    return Config(), [sys.executable, str(program)], {}


def test_up_exits_with_1_and_shows_the_last_lines_when_a_part_exits(
    parts: tuple[Config, Sequence[str], Mapping[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    config, command, _ = parts
    assert demo.up(config, command, None) == 1
    said = capsys.readouterr().err
    assert "agent ended with exit code 1" in said
    assert "no spool" in said


def test_the_demo_exits_with_1_when_a_part_exits_and_leaves_no_folder(
    parts: tuple[Config, Sequence[str], Mapping[str, str]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, command, environ = parts
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert demo.demo(config, command, environ) == 1
    said = capsys.readouterr().err
    assert "sim-* is SIMULATED" in said
    assert "simulator ended with exit code 1" in said
    assert list(tmp_path.glob("fleetpulse-demo-*")) == []


def test_stopping_up_is_not_a_failure(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda _: None)
    supervisor.request_stop()
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert demo.run_supervised(supervisor, lambda: demo.start_and_watch(supervisor, {"agent": waits}, Config())) == 0
    assert supervisor.children["agent"].process.poll() is not None
