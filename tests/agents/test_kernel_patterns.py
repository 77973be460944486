"""Which lines of the kernel log become events: one line of each kind, lines that must not, and files of the user."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.collectors.host.kernel_patterns import load_patterns, shipped_patterns
from agents.collectors.host.kmsg import MAX_TEXT
from agents.collectors.registry import configured_collectors
from pipeline.model.errors import ConfigError
from tests.examples import examples

FIXTURE = Path(__file__).parent / "fixtures" / "kernel_lines.tsv"
LINES = [line.split("\t") for line in FIXTURE.read_text().splitlines() if not line.startswith("#")]
QUIET = (
    "nvidia-nvswitch2: open (major=510)",
    "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
    "perf: interrupt took too long (2509 > 2500), lowering kernel.perf_event_max_sample_rate to 79500",
    "oom_reaper: reaped process 345646 (vector), now anon-rss:0kB",
    "mce: CPU12: Core temperature/speed normal",
    "mlx5_core 0000:3b:00.0 ens2: Link up",
    "nvme nvme0: 64/0/0 default/read/poll queues",
    "EXT4-fs (sda1): mounted filesystem with ordered data mode",
    "DEBUG: Oops: written by a person",
    "",
)


@pytest.mark.parametrize(("name", "device", "line"), LINES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(LINES)])
def test_each_kind_of_line_is_matched(name: str, device: str, line: str) -> None:
    patterns = load_patterns()
    assert patterns.may_match(line)
    found = patterns.find_match(line)
    assert found is not None
    assert (found.pattern.name, found.device or "-") == (name, device)
    logged = re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}(\.[0-7])?", line)
    assert found.pci == (logged[0] if logged else None)


def test_every_shipped_pattern_has_a_sample_line() -> None:
    version, patterns = shipped_patterns()
    assert version
    assert {pattern.name for pattern in patterns} == {name for name, _, _ in LINES}


@pytest.mark.parametrize("line", QUIET)
def test_ordinary_lines_do_not_match(line: str) -> None:
    assert load_patterns().find_match(line) is None


def test_a_users_patterns_come_first_replace_and_switch_off(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'version = "3"\n[[pattern]]\nname = "lustre"\nclass = "file system"\nseverity = "warning"\n'
        "words = ['LustreError']\nmatch = 'LustreError: (?P<device>\\S{1,40})'\n"
        '[[pattern]]\nname = "link_down"\nenabled = false\n'
        '[[pattern]]\nname = "panic"\nclass = "kernel"\nseverity = "info"\nwords = ["Kernel panic"]\nmatch = "panic"\n'
    )
    found = load_patterns(own)
    assert found.version.endswith("own.toml 3")
    reported = found.find_match("LustreError: 11-0: a")
    assert reported is not None
    assert reported.device == "11-0:"
    assert found.find_match("mlx5_core 0000:3b:00.0 ens2: Link down") is None
    panic = found.find_match("Kernel panic - not syncing: a")
    assert panic is not None
    assert panic.pattern.severity == "info"
    assert len(found.patterns) == len(shipped_patterns()[1])


GOOD = {"name": "'a'", "class": "'b'", "severity": "'info'", "words": "['w']", "match": "'m'"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"match": "'('"}, r"number 1: match = '\(': .*expected a regular expression"),
        ({"match": None}, r"match = None: expected a regular expression"),
        ({"words": "[]"}, r"words = \[\]: expected a list of texts"),
        ({"name": "'A B'"}, r"name = 'A B': expected 1 to 64 of a-z"),
        ({"severity": "'bad'"}, r"severity = 'bad': expected one of info, warning, critical"),
        ({"class": "3"}, r"class = 3: expected a text"),
        ({"clas": "3"}, r"clas: unknown key; expected name, class"),
    ],
)
def test_a_wrong_pattern_is_refused_at_start(tmp_path: Path, change: dict[str, str | None], says: str) -> None:
    own = tmp_path / "own.toml"
    keys = {**GOOD, **change}
    own.write_text("[[pattern]]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items() if v is not None))
    with pytest.raises(ConfigError, match=rf"own\.toml: \[\[pattern\]\] number 1: .*|{says}") as refused:
        configured_collectors({"kernel_log": {"patterns": str(own)}}, "f.toml")
    refused.match(says)


words = sorted({word for pattern in shipped_patterns()[1] for word in pattern.words})
pieces = st.sampled_from([*words, "mlx5_core 0000:3b:00.0", "NVRM: Xid (", "(", "A" * 40, " ", ":", "0x1", "[", "pci"])


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.one_of(pieces, st.text(max_size=10)), max_size=200))
def test_hostile_lines_take_bounded_time(parts: list[str]) -> None:
    line = "".join(parts)[:MAX_TEXT]
    patterns = load_patterns()
    begun = time.process_time()
    patterns.may_match(line)
    patterns.find_match(line)
    assert time.process_time() - begun < 0.25


@pytest.mark.parametrize(
    "piece", [*words, "mlx5_core 0000:3b:00.0: ", "rcu", "EXT4-fs error (device ", "nvme nvme0: I/O 1 "]
)
def test_a_piece_repeated_to_the_end_takes_bounded_time(piece: str) -> None:
    line = (piece * MAX_TEXT)[:MAX_TEXT]
    begun = time.process_time()
    load_patterns().find_match(line)
    assert time.process_time() - begun < 0.25
