"""`config check` judges groups of other nodes: with what applies to all of their nodes, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import fleetpulse
from pipeline.commands import installed, start_checks
from pipeline.config import files

ROOT = Path(__file__).parents[2]
ROUTED = '[[groups]]\nnodes = "server-1"\n[[groups.notify.webhooks]]\nname = "oncall"\nurl = "https://h.example/"\n'
ESCALATED = '[[incidents.escalation]]\nafter_minutes = 5\nreceivers = ["oncall"]\n'
H200 = '[[groups]]\nnodes = ["h200-*"]\n'


@pytest.fixture(autouse=True)
def _own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.NODE_VARIABLE, "server-1")


def check(tmp_path: Path, text: str, *words: str) -> int:
    path = tmp_path / "fleetpulse.toml"
    path.write_text(text)
    return fleetpulse.main(["config", "check", *words, "--config", str(path)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (H200 + "[groups.collector.pci]\ngpus_expectd = 8\n", "[[groups]] 1: [collector.pci] gpus_expectd: no such"),
        (H200 + "[groups.collector.nope]\nx = 1\n", "[[groups]] 1: [collector.nope]"),
        (H200 + "[groups.detector.nope]\nx = 1\n", "[[groups]] 1: [detector.nope]"),
        (H200 + '[groups.opentelemetry]\nmetrics = "all"\n', '[[groups]] 1: [opentelemetry] metrics = "all": requires'),
        (H200 + "[groups.opentelemetry]\nkafka = true\n", "[[groups]] 1: [opentelemetry] kafka = true: requires"),
        (
            "[agent]\notlp_port = 4318\n" + H200 + "[groups.opentelemetry]\nprometheus_port = 4318\n",
            "[[groups]] 1: [opentelemetry] prometheus_port = 4318: that is",
        ),
        ('[[groups]]\nnodes = "*"\n[groups.api]\nport = 1\n' + H200 + "[groups.api]\nport = -1\n", "[[groups]] 2"),
        ('[agent]\notlp_port = -1\n[[groups]]\nnodes = "server-1"\n[groups.agent]\notlp_port = 1\n' + H200
         + "[groups.api]\nport = 1\n", "toml: [agent] otlp_port"),
    ],
)  # fmt: skip
def test_a_group_of_other_nodes_that_is_wrong_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one is wrong without the group: the message names the file."""
    assert check(tmp_path, text) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        '[dashboard]\nport = 99999\n[[groups]]\nnodes = "*"\n[groups.dashboard]\nport = 8501\n'
        + H200 + "[groups.api]\nport = 1\n",
        '[dashboard]\nport = 99999\n[[groups]]\nnodes = ["h200*", "server-?"]\n[groups.dashboard]\nport = 8501\n'
        + H200 + "[groups.api]\nport = 1\n" + '[[groups]]\nnodes = "server-1"\n[groups.api]\nport = 2\n',
        H200 + "[groups.api]\nport = -1\n" + '[[groups]]\nnodes = "*"\n[groups.api]\nport = 1\n',
        ESCALATED + ROUTED + H200 + "[groups.collector.pci]\ngpus_expected = 8\n",
        '[opentelemetry]\nmetrics = "all"\n' + H200 + '[groups.opentelemetry]\nendpoint = "http://127.0.0.1:4318"\n'
        + '[[groups]]\nnodes = "server-*"\n[groups.api]\nport = 1\n',
        H200 + '[groups.opentelemetry]\nmetrics = "all"\n'
        + '[[groups]]\nnodes = "h200-1[0-9]"\n[groups.opentelemetry]\nendpoint = "http://127.0.0.1:4318"\n',
    ],
    ids=["a group of all", "a wider group", "a later group", "receivers of the server", "some are agents", "narrower"],
)  # fmt: skip
def test_a_file_that_is_sound_on_every_node_is_accepted(text: str, tmp_path: Path) -> None:
    assert check(tmp_path, text) == 0


def test_a_variable_of_all_hosts_completes_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETPULSE__OPENTELEMETRY__ENDPOINT", "http://127.0.0.1:4318")
    assert check(tmp_path, H200 + '[groups.opentelemetry]\nmetrics = "all"\n') == 0


def test_a_step_of_escalation_needs_its_receiver_where_a_pipeline_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(files.NODE_VARIABLE, "h200-1")
    assert check(tmp_path, ESCALATED + ROUTED) == 2
    for module in (installed, start_checks):
        monkeypatch.setattr(module, "is_node", lambda: True)
    assert check(tmp_path, ESCALATED + ROUTED) == 0


def test_the_check_for_an_agent_loads_no_detectors_and_refuses_what_its_start_refuses(tmp_path: Path) -> None:
    """It runs in the agent's 128 MiB, beside the agent."""
    if importlib.util.find_spec("numba") is None:
        pytest.skip("no detectors here")
    path = tmp_path / "fleetpulse.toml"
    path.write_text("[detector.nope]\nx = 1\n" + H200 + "[groups.api]\nport = -1\n")
    program = (
        "import fleetpulse, sys; code = fleetpulse.main(['config', 'check', '--agent', '--config', sys.argv[1]]);"
        "print(code, {'numba', 'llvmlite', 'duckdb'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()", done.stderr
    assert check(tmp_path, '[opentelemetry]\nmetrics = "all"\n', "--agent") == 2
    assert check(tmp_path, "[collector.pci]\nnosuch = 1\n", "--agent") == 2


def test_show_names_only_variables_that_set_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SITE", "KAFKA", "STORE__MEMORY_LIMIT"):
        monkeypatch.setenv(name, "x")
    path = tmp_path / "fleetpulse.toml"
    path.write_text('[site]\nname = "east"\n')
    assert fleetpulse.main(["config", "show", "--changed", "--output", "csv", "--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["key,value,from", f"site.name,east,{path}", "agent.node,server-1,FLEETPULSE__AGENT__NODE"]
