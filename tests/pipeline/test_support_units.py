"""The archive has units and drop-ins, as most faults of a start are in them, and no secret that they set."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands import support
from pipeline.commands.support_units import collect_units, hide_secrets
from pipeline.config.addresses import HIDDEN
from pipeline.config.sections import Config


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
        ("SetCredential=kafka.password:pa55\n", f"SetCredential=kafka.password:{HIDDEN}\n"),
        ("SetCredentialEncrypted=x: \\\n  pa55 \\\n  more\nUser=a\n", f"SetCredentialEncrypted=x:{HIDDEN}\nUser=a\n"),
        ('Environment=A=1 "PROXY_PASSWORD=pa 55"\n', f'Environment=A=1 "PROXY_PASSWORD={HIDDEN}\n'),
        ("Environment=A=1 \\\n  api_token=pa55\nUser=a\n", f"Environment=A=1 \\\n  api_token={HIDDEN}\nUser=a\n"),
        ("Environment=HTTPS_PROXY=http://u:pa55@p:1/x", f"Environment=HTTPS_PROXY=http://p:1/{HIDDEN}"),
        ("Environment=KAFKA__PASSWORD_FILE=/run/x\n", "Environment=KAFKA__PASSWORD_FILE=/run/x\n"),
        ("LoadCredential=tokens:/etc/tokens\n\nUser=a\n", "LoadCredential=tokens:/etc/tokens\n\nUser=a\n"),
    ],
)
def test_what_a_unit_sets_of_secrets_is_hidden(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown


def test_the_archive_has_the_units_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "collect_units", lambda: iter([("units/fleetpulse-agent.service.txt", "[Service]\n")]))
    assert ("units/fleetpulse-agent.service.txt", "[Service]\n") in list(support.collect(Config(), "[]"))
