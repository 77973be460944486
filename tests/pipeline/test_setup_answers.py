"""Answers of `fleetpulse setup` that the pipeline could not use, and receivers inside the site."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.commands.start_checks import check_receivers
from pipeline.config.sections import load_config
from pipeline.model.errors import ConfigError, UsageError
from tests.pipeline.test_setup_and_support import set_up


def test_a_name_that_the_pipeline_would_reject_is_refused_at_once(tmp_path: Path) -> None:
    """100,000 characters took minutes; a site of more than 256 loses all its telemetry."""
    path = tmp_path / "fleetpulse.toml"
    begun = time.monotonic()
    with pytest.raises(UsageError, match=r"--site: found 100,000 characters; expected a name of at most 256"):
        set_up(path, "--site", "a" * 100_000, answers="\n\n\n\n", packaged=False)
    set_up(path, answers=f"\n{'b' * 100_000}\n\n{'k' * 50_000}:1\n\n\n{'h' * 50_000}\n\n", packaged=False)
    assert time.monotonic() - begun < 5
    assert load_config(path, {}).site.name == "local", "asked again"
    for bad in ("a\u202eb", "a\u200bb"):
        with pytest.raises(UsageError, match=r"U\+20.*expected a name of visible characters"):
            set_up(path, "--replace", "--site", bad, answers="\n\n\n\n", packaged=False)
    set_up(path, "--replace", "--site", "z" * 256, answers="\n\n\n\n", packaged=False)


def test_a_webhook_inside_the_site_needs_two_flags_and_the_pipeline_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "fleetpulse.toml"
    words = ["--role", "one-host", "--kafka", "", "--gpus", "0", "--site", "a", "--webhook", "http://10.1.2.3:9/hook"]
    with pytest.raises(ConfigError, match=r"found http; .*; flags of setup: --allow-http, --allow-private NETWORK"):
        set_up(path, *words)
    with pytest.raises(ConfigError, match=r"10.1.2.3 is private; .*; flags of setup: --allow-http, --allow-private"):
        set_up(path, *words, "--allow-http")
    with pytest.raises(ConfigError, match=r"allow_private: 'ten' does not appear to be .*; expected CIDRs"):
        set_up(path, *words, "--allow-http", "--allow-private", "ten")
    assert list(tmp_path.iterdir()) == []
    set_up(path, *words, "--allow-http", "--allow-private", "10.0.0.0/8, fd00::/8", packaged=False)
    config = load_config(path, {})
    (hook,) = config.notify.webhooks
    assert (hook.allow_http, hook.allow_private) == (True, ("10.0.0.0/8", "fd00::/8"))
    check_receivers(config, secrets=True)


def test_https_beyond_the_site_is_written_without_exceptions(tmp_path: Path) -> None:
    path = tmp_path / "fleetpulse.toml"
    set_up(path, "--allow-http", "--webhook", "https://a.example/h", answers="\n\n\n\n", packaged=False)
    assert "allow_" not in path.read_text()
