"""The archive has units and drop-ins, as most faults of a start are in them, and no secret that they set."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands import support
from pipeline.commands.support_units import collect_units, hide_secrets
from pipeline.config.addresses import HIDDEN
from pipeline.config.sections import Config

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"


def test_a_unit_comes_with_its_drop_ins_of_all_folders(tmp_path: Path) -> None:
    lib, etc = tmp_path / "lib", tmp_path / "etc"
    for folder in (lib, etc / "fleetpulse-agent.service.d", etc / "fleetpulse-pipeline.service.d"):
        folder.mkdir(parents=True)
    (lib / "fleetpulse-agent.service").write_text("[Service]\nCPUQuota=10%\n")
    (lib / "other.service").write_text("[Service]\n")
    (etc / "fleetpulse-agent.service").symlink_to("/dev/null")
    (etc / "fleetpulse-agent.service.d" / "kafka.conf").write_text("[Service]\nLoadCredential=kafka.password:/etc/x\n")
    (etc / "fleetpulse-pipeline.service.d" / "gone.conf").symlink_to("nowhere")
    found = dict(collect_units((lib, etc)))
    assert list(found) == ["units/fleetpulse-agent.service.txt", "units/fleetpulse-pipeline.service.txt"]
    agent, pipeline = found.values()
    assert agent == (
        f"# {lib}/fleetpulse-agent.service\n[Service]\nCPUQuota=10%\n\n"
        f"# {etc}/fleetpulse-agent.service\n# /dev/null: is no regular file\n\n"
        f"# {etc}/fleetpulse-agent.service.d/kafka.conf\n[Service]\nLoadCredential=kafka.password:/etc/x\n"
    )
    assert "is no regular file" in pipeline


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("SetCredential=kafka.password:pa55", f"SetCredential=kafka.password:{HIDDEN}"),
        ("SetCredentialEncrypted=x: \\\n  pa55 \\\n  more\nUser=a", f"SetCredentialEncrypted=x:{HIDDEN}\nUser=a"),
        ('Environment=A=1 "PROXY_PASSWORD=pa 55" B=2', f"Environment=A=1 PROXY_PASSWORD={HIDDEN} B={HIDDEN}"),
        ('Environment=A="pa 55"', f"Environment=A={HIDDEN}"),
        ("Environment=A=1 \\\n  api_token=pa55\nUser=a", f"Environment=A=1 api_token={HIDDEN}\nUser=a"),
        ("Environment=HTTPS_PROXY=http://u:pa55@p:1/x", f"Environment=HTTPS_PROXY=http://p:1/{HIDDEN}"),
        ("Environment=KAFKA__PASSWORD_FILE=/run/x", "Environment=KAFKA__PASSWORD_FILE=/run/x"),
        ("Environment = X_PASSWORD=pa55", f"Environment=X_PASSWORD={HIDDEN}"),
        ("Environment=A=1 \\\n# a comment\n  X_TOKEN=pa55", f"Environment=A=1 X_TOKEN={HIDDEN}"),
        ("Environment=A=1 \\ \n  X_TOKEN=pa55", f"Environment=A=1 X_TOKEN={HIDDEN}"),
        ("CPUQuota=1% \\ \nEnvironment=X=pa55", f"CPUQuota={HIDDEN}"),
        ("# old: Environment=A=pa55\n ;Environment=A=pa55\nUser=a", "User=a"),
        ("Environment=KAFKA_PW=pa55 AUTH=pa55", f"Environment=KAFKA_PW={HIDDEN} AUTH={HIDDEN}"),
        ("Environment=BEARER=Authorization: Bearer pa55==", f"Environment=BEARER={HIDDEN} {HIDDEN}"),
        ("Environment=A=\\x70a55 B=1", f"Environment={HIDDEN}"),
        ("ExecStartPre=/bin/a login --password pa55 --token=pa55", None),
        ("ExecStartPre=-/bin/a -u /pa/55 -ppa55 'b pa55'", f"ExecStartPre=-/bin/a -u {HIDDEN} {HIDDEN} {HIDDEN}"),
        ("ExecStart=\nExecStartPost=/bin/sh -c 'PASSWORD=pa55 a'", f"ExecStart=\nExecStartPost=/bin/sh -c {HIDDEN}"),
        ("LogExtraFields=TOKEN=pa55\nX_TOKEN=pa55\npa55", f"LogExtraFields={HIDDEN}\nX_TOKEN={HIDDEN}\n{HIDDEN}"),
        ("LoadCredential=tokens:/etc/tokens\n\nUser=a", "LoadCredential=tokens:/etc/tokens\n\nUser=a"),
    ],
)
def test_what_a_unit_sets_of_secrets_is_hidden(text: str, shown: str | None) -> None:
    expected = shown or f"ExecStartPre=/bin/a {HIDDEN} --password {HIDDEN} --token={HIDDEN}"
    assert hide_secrets(f"{text}\n") == f"{expected}\n"


@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.service")), ids=lambda unit: unit.stem)
def test_our_own_units_are_shown(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    shown = set(hide_secrets(unit.read_text()).splitlines())
    free = ("#", "Description=", "Documentation=", "ExecReload=")
    assert [line for line in lines if not line.startswith(free) and line not in shown] == []


def test_the_archive_has_the_units_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "collect_units", lambda: iter([("units/fleetpulse-agent.service.txt", "[Service]\n")]))
    assert ("units/fleetpulse-agent.service.txt", "[Service]\n") in list(support.collect(Config(), "[]"))
