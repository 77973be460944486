"""The spool checks of the doctor: slow disks, damaged marks, stray files; a hanging disk does not block it."""

from __future__ import annotations

import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from agents.node.spool.spool import Spool as Writer
from pipeline.commands import doctor
from pipeline.commands import doctor as doctor_spool
from pipeline.commands.checks import Check
from pipeline.commands.next_steps import suggest_next
from pipeline.config.sections import Config, Spool
from pipeline.transport import segments, wire


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(spool=Spool(tmp_path / "spool"))


def filled_spool(config: Config) -> Path:
    with Writer(config.spool.directory, "n1", "telemetry.v1", segment_bytes=1000, max_bytes=1 << 20) as spool:
        spool.append_many([bytes(100)] * 50, wire.TELEMETRY_KIND, 0)
    return segments.epoch_folders(config.spool.directory / "n1" / "telemetry.v1")[0]


def test_an_intact_spool_is_ok_and_a_missing_one_is_not_a_fault(config: Config) -> None:
    assert doctor_spool.spool_files(config).state == "ok"
    assert doctor_spool.disk_speed(config).state == "info"
    filled_spool(config)
    assert doctor_spool.spool_files(config).state == "ok"
    assert doctor_spool.disk_speed(config).state == "ok"
    assert [path.name for path in config.spool.directory.iterdir()] == ["n1"]


@pytest.mark.parametrize(("content", "word"), [(None, "missing"), (b"", "damaged"), (bytes(32), "damaged")])
def test_a_damaged_mark_is_reported(config: Config, content: bytes | None, word: str) -> None:
    """The doctor once reported ok."""
    mark = filled_spool(config) / "mark"
    mark.unlink()
    if content is not None:
        mark.write_bytes(content)
    found = doctor_spool.spool_files(config)
    assert (found.state, found.found) == ("warn", f"{mark}: {word}")


def test_a_stray_segment_is_reported_with_the_reason(config: Config) -> None:
    folder = filled_spool(config)
    stray = shutil.copy(sorted(folder.glob("*.seg"))[0], segments.segment_path(folder, 3))
    found = doctor_spool.spool_files(config)
    assert (found.state, found.found) == ("warn", f"{stray}: begins with record 0")


@pytest.mark.slow
def test_a_slow_disk_is_a_warning_and_a_hanging_one_a_failure(config: Config) -> None:
    filled_spool(config)
    release = threading.Event()
    hung = doctor_spool.disk_speed(config, 0.1, lambda _: release.wait())
    release.set()
    assert (hung.state, "no answer within 0.1 s" in hung.found) == ("fail", True)
    slow = doctor_spool.disk_speed(config, 30, lambda _: time.sleep(doctor_spool.SLOW_S))
    assert (slow.state, "durable in 1" in slow.found) == ("warn", True)


def test_a_check_that_hangs_fails_and_the_others_run(config: Config) -> None:
    release = threading.Event()

    def hanging(_: Config) -> Check:
        release.wait()
        return Check("hanging", "ok", "nothing")

    found = doctor.run_checks(config, (partial(hanging), doctor.configuration), limit_s=0.1)
    release.set()
    assert [(check.name, check.state) for check in found] == [("hanging", "fail"), ("configuration", "ok")]
    assert found[0].found == "not finished within 0.1 s"  # why is not known
    assert any("uptime" in line for line in suggest_next(config, found))


def test_a_check_with_a_bug_fails_and_the_others_run(config: Config) -> None:
    def wrong(_: Config) -> Check:
        raise KeyError("key")

    found = doctor.run_checks(config, (wrong, doctor.configuration))
    assert [(check.name, check.state) for check in found] == [("wrong", "fail"), ("configuration", "ok")]
