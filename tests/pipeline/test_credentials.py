"""Secrets that systemd hands to units: their files are known by the drop-ins, and a missing copy is explained."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.commands import doctor, notify, setup_receiver, support_secrets
from pipeline.commands.setup_files import PreparedFiles
from pipeline.config.receivers import Slack
from pipeline.config.sections import Config, load_config
from pipeline.runtime import credentials, private_files, secret_contents
from pipeline.runtime.reload import Reload

UNIT = Path(__file__).parents[2] / "deploy/systemd/fleetpulse-executor.service"
ADDRESS = "https://hooks.slack.com/services/T0/B0/KEYOFTHEPATH"


@pytest.fixture
def etc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a packaged host in which `fleetpulse setup` writes; no unit runs."""
    monkeypatch.setattr(credentials, "DROP_INS", tmp_path / "systemd/system")
    monkeypatch.setattr(credentials, "PACKAGED", tmp_path / "lib")
    monkeypatch.setattr(credentials, "RUNTIME", tmp_path / "run-units")
    monkeypatch.setattr(credentials, "CREDENTIALS", tmp_path / "run")
    monkeypatch.setattr(setup_receiver, "CREDENTIALS", tmp_path / "run")
    return tmp_path


@pytest.fixture
def secret(etc: Path) -> Path:
    """The file that setup writes, with its drop-in."""
    secret = etc / "on-call.secret"
    with PreparedFiles() as files:
        setup_receiver.prepare_secret(files, setup_receiver.parse_receiver(ADDRESS), secret, etc)
        files.place()
    return secret


def config_of(etc: Path) -> Config:
    config = load_config(None, {})
    slack = Slack("on-call", url_file=setup_receiver.find_copy(etc / "on-call.secret"))
    return replace(config, notify=replace(config.notify, slack=(slack,)))


def test_before_its_unit_runs_a_receiver_does_not_fail_and_the_next_step_is_the_unit(etc: Path, secret: Path) -> None:
    (check,) = notify.check_receivers(config_of(etc))
    assert (check.state, check.fix) == ("warn", "systemctl enable --now fleetpulse-pipeline")
    assert check.found.endswith("systemd makes this copy when fleetpulse-pipeline.service starts")


def test_a_secret_that_a_running_unit_lacks_needs_a_restart(etc: Path, secret: Path) -> None:
    (etc / "run/fleetpulse-pipeline.service").mkdir(parents=True)
    (check,) = notify.check_receivers(config_of(etc))
    assert (check.state, check.fix) == ("fail", "systemctl restart fleetpulse-pipeline")


def test_a_copy_older_than_its_file_needs_a_restart(etc: Path, secret: Path) -> None:
    config = config_of(etc)
    copy = setup_receiver.find_copy(secret)
    copy.parent.mkdir(parents=True)
    copy.write_text(secret.read_text())
    assert secret_contents.list_old_copies(config) == []
    os.utime(copy, (1, 1))
    said = f"{secret} changed, and fleetpulse-pipeline.service has a copy of before; run: systemctl restart"
    (found,) = secret_contents.list_old_copies(config)
    assert said in found
    check = doctor.secrets(config)
    assert (check.state, check.fix) == ("warn", "systemctl restart fleetpulse-pipeline.service")
    assert said in check.found
    log: list[str] = []
    before = signal.getsignal(signal.SIGHUP)
    hangup = Reload("pipeline", config, lambda: config, (), lambda *_: None, log.append)
    signal.raise_signal(signal.SIGHUP)
    assert not hangup.poll()
    signal.signal(signal.SIGHUP, before)
    assert log == [f"not reloaded: {found}", "configuration reloaded: nothing changed"]


def test_without_its_drop_in_as_after_a_restore_of_etc_fleetpulse_it_says_what_is_missing(etc: Path) -> None:
    (check,) = notify.check_receivers(config_of(etc))
    assert check.state == "fail"
    assert check.found.endswith("no drop-in of fleetpulse-pipeline.service has LoadCredential=on-call.secret:FILE")


def test_a_line_of_a_unit_that_an_administrator_changed_counts_as_one_of_a_drop_in(etc: Path) -> None:
    unit = etc / "systemd/system/fleetpulse-pipeline.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nLoadCredential=on-call.secret:/etc/fleetpulse/none\n")
    (check,) = notify.check_receivers(config_of(etc))
    assert check.state == "warn"
    assert not private_files.list_secret_files(load_config(None, {})), "a file that does not exist has no mode"


def test_the_file_of_a_copy_is_what_doctor_looks_at_and_support_hides(etc: Path, secret: Path) -> None:
    other = etc / "kafka.password"
    other.write_text("password-of-kafka\n")
    drop_in = etc / "systemd/system/fleetpulse-agent.service.d/kafka.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(f"[Service]\n#LoadCredential=no:/etc/no\nLoadCredential=kafka.password:{other}\n")
    for file in (secret, other):
        file.chmod(0o600)
    config = config_of(etc)
    assert set(private_files.list_secret_files(config).values()) == {secret, other}
    assert doctor.secrets(config).state == "ok"
    assert {ADDRESS, "password-of-kafka"} <= set(support_secrets.find_secrets(config))
    for file in (secret, other):
        file.chmod(0o644)
        check = doctor.secrets(config)
        assert (check.state, check.fix) == ("warn", f"chmod 600 {file}")
        file.chmod(0o600)


def test_the_token_of_the_executor_is_known_by_the_unit_of_its_package(etc: Path) -> None:
    """No key names /etc/fleetpulse/executor.token: the unit hands it out."""
    token, unit = etc / "executor.token", etc / "lib/fleetpulse-executor.service"
    token.write_text("executor:fp_token-of-executor\n")
    token.chmod(0o644)
    unit.parent.mkdir()
    unit.write_text(UNIT.read_text().replace("/etc/fleetpulse", str(etc)))
    config = load_config(None, {})
    assert (doctor.secrets(config).state, doctor.secrets(config).fix) == ("warn", f"chmod 600 {token}")
    assert "fp_token-of-executor" in support_secrets.find_secrets(config)
    changed = etc / "systemd/system/fleetpulse-executor.service"
    changed.parent.mkdir(parents=True)
    changed.write_text("[Service]\nLoadCredential = token:/etc/other\n")
    assert [out.file for out in credentials.list_handed_out().values()] == [Path("/etc/other")], (
        "it replaces the package's"
    )


LINE = "[Service]\nLoadCredential{form}={name}:{file}\n"


def hand_out(folder: Path, drop_in: str, file: Path, form: str = "") -> None:
    made = folder / "fleetpulse-pipeline.service.d" / drop_in
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(LINE.format(form=form, name="on-call.secret", file=file))


def test_a_drop_in_of_this_start_of_the_host_counts_unless_one_of_etc_has_its_name(etc: Path) -> None:
    """`systemctl edit --runtime` writes below /run; systemd takes the file of a name from /etc first."""
    hand_out(etc / "run-units", "on-call.conf", etc / "runtime")
    (check,) = notify.check_receivers(config_of(etc))
    assert (check.state, check.fix) == ("warn", "systemctl enable --now fleetpulse-pipeline")
    hand_out(etc / "systemd/system", "on-call.conf", etc / "lasting")
    assert [out.file for out in credentials.list_handed_out().values()] == [etc / "lasting"]
    hand_out(etc / "run-units", "on-call.d.conf", etc / "runtime")
    assert [out.file for out in credentials.list_handed_out().values()] == [etc / "runtime"], "the last name wins"


def test_of_an_encrypted_secret_the_copy_is_checked_and_hidden_not_the_file_that_all_may_read(etc: Path) -> None:
    file = etc / "on-call.cred"
    file.write_text("encrypted-for-this-host\n")
    file.chmod(0o644)
    hand_out(etc / "systemd/system", "on-call.conf", file, "Encrypted")
    config = config_of(etc)
    (check,) = notify.check_receivers(config)
    assert check.state == "warn", "its unit does not run yet"
    assert doctor.secrets(config).state == "ok"
    copy = setup_receiver.find_copy(etc / "on-call.secret")
    copy.parent.mkdir(parents=True)
    copy.write_text(f"{ADDRESS}\n")
    copy.chmod(0o400)
    assert doctor.secrets(config).state == "ok"
    assert ADDRESS in support_secrets.find_secrets(config)
    file.unlink()
    assert doctor.secrets(config).found == f"notify.slack.0.url_file = '{file}' does not exist"


def test_a_secret_file_that_does_not_exist_is_a_warning_and_two_keys_of_one_file_are_one_file(etc: Path) -> None:
    tokens = etc / "tokens"
    config = load_config(None, {})
    config = replace(config, api=replace(config.api, token_file=tokens))
    config = replace(config, dashboard=replace(config.dashboard, token_file=tokens))
    check = doctor.secrets(config)
    assert check.state == "warn"
    assert f"api.token_file = '{tokens}' does not exist" in check.found
    assert "fleetpulse init" in check.fix
    tokens.touch(0o600)
    assert (doctor.secrets(config).state, doctor.secrets(config).found.split(",")[0]) == ("ok", "1 file")


def test_a_copy_that_nothing_hands_out_is_absent_and_one_that_is_handed_out_is_looked_for_at_its_source(
    etc: Path, secret: Path
) -> None:
    assert doctor.secrets(config_of(etc)).state == "ok"
    secret.unlink()
    assert doctor.secrets(config_of(etc)).found.endswith(f"'{secret}' does not exist")
    (etc / "systemd/system/fleetpulse-pipeline.service.d/on-call.conf").unlink()
    check = doctor.secrets(config_of(etc))
    assert check.state == "warn"
    assert check.found.endswith("no drop-in of fleetpulse-pipeline.service has LoadCredential=on-call.secret:FILE")


def test_a_file_in_a_folder_that_the_user_may_not_enter_is_neither_absent_nor_sound(
    etc: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests run as root, which enters every folder."""
    stat = private_files.os.stat

    def deny(path: object, **more: bool) -> object:
        if Path(str(path)) == secret:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(private_files.os, "stat", deny)
    check = doctor.secrets(config_of(etc))
    assert (check.state, check.found) == ("info", "1 of 1 cannot be looked at by this user; run doctor as root")
