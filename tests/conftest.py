"""Fixtures of all tests: real Kafka brokers. A test that uses one gets the mark `kafka` automatically.

`make test` is for every change: all but the tests marked `extended`, which `make test-all` runs. A test is extended if
it is slow or needs a part that few machines have. Kafka and Chromium start once for a few walks (mark `walk`). A
property of Hypothesis (mark `hypothesis`) runs in both: on a fifth of its examples, and on all of them. Where one rule
is tried on many costly cases, `make test` takes a sample of them (mark `sample(every=n)`: of each test the first case
and every n-th after it) and `make test-all` the others.

kafka-python leaves the sockets of refused connections to the garbage collector, which warns in whichever test it runs.
A test whose brokers refuse has the mark `refusals`. After it, and after any other test with brokers, leftover sockets
are collected, so that no later test of the same process fails because of them.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import are_fixed, examples
from tests.kafka_broker import Address, Broker, BrokerError, External, class_path, missing
from tests.kafka_security import Security
from tests.parts import do_without

EXTERNAL = "FLEETPULSE_TEST_KAFKA"
"""host:port of brokers to use in place of the shared one. Tests that kill or freeze a broker always start their own."""
FIX = "run 'make parts'"
BROKERS = {"kafka", "own_broker", "new_broker", "secure_kafka"}
RARE_PARTS = (
    *(
        "alertmanager",
        "collector",
        "gpu",
        "helm",
        "ansible",
        "infiniband",
        "kubernetes",
        "lldp",
        "oidc",
        "prometheus",
        "redfish",
        "shells",
        "slurm",
    ),
    "torch",
)

FIRST = {
    name: place
    for place, name in enumerate(
        (
            *("test_house.py", "test_contract.py", "test_gateway.py"),
            *("test_dashboard_all_pages.py", "test_simulated.py", "test_kafka_cluster.py", "test_scenario_suite.py"),
            *("test_kafka_losses.py", "test_live_replay.py", "test_acts_kill.py", "test_dashboard_browser.py"),
            *("test_acts_walk.py", "test_acts_property.py", "test_fleet_map_browser.py", "test_ingest.py"),
            *("test_kafka_failures.py", "test_thermal_worlds.py", "test_slow_disk.py", "test_commands.py"),
            *("test_device_pages_browser.py", "test_admission.py", "test_sender.py"),
        )
    )
}
"""Files whose time is more than a minute: begun first, or all workers but one would wait for them at the end. The first
three have mypy and compile most loops, half a minute each, and keep the code for the tests after them, which else
compile it as well. After them files that compute and files that wait for brokers and pages are in turns.
"""

# tests run in parallel: the run time of an example shows nothing about it
settings.register_profile(
    "crowded",
    max_examples=examples(100),
    deadline=None,
    derandomize=are_fixed(),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("crowded")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.get(item.path.name, len(FIRST)))  # stable: within a file the order stays
    places: Counter[str] = Counter()
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: an address in a name differs from worker to worker; give it an id")
        if BROKERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("kafka")
        if item.get_closest_marker("refusals"):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))
        test = item.nodeid.partition("[")[0]
        sample = item.get_closest_marker("sample")
        left_out = sample is not None and places[test] % sample.kwargs["every"] != 0
        places[test] += 1
        if left_out or is_extended({mark.name for mark in item.iter_markers()}):
            item.add_marker("extended")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for no garbage while test modules are loaded: nearly all that they make stays, and the looks at it took 2.7
    of the 13.1 s of CPU of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leaves what collecting has made (600,000 objects) out of later collections of garbage, of 0.3 s each."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Frees it at the end, or extension modules report it as leaked."""
    gc.unfreeze()


def is_extended(marks: set[str]) -> bool:
    """Returns whether a test with these marks runs only in `make test-all`."""
    if not marks.isdisjoint({"slow", *RARE_PARTS}):
        return True
    return not marks.isdisjoint({"kafka", "chromium"}) and "walk" not in marks


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest's own wrappers
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Collects garbage after pytest has released the test's log, whose records hold errors that hold the sockets."""
    yield
    if any(item.get_closest_marker(name) for name in ("kafka", "refusals")):
        from tests.kafka_clients import untidy_refusals  # here: most tests need no Kafka client

        with untidy_refusals():
            pass


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Restores the umask: commands change it, and it would apply to all later tests."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="session", autouse=True)
def _template_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """New stores are copies of a template (tests/template_store.py)."""
    if "pipeline.store.database" not in sys.modules:  # no collected test opens one
        yield
        return
    from tests.template_store import template_store

    with template_store(tmp_path_factory.mktemp("new_store")):
        yield


def need_broker() -> None:
    """Skips (or fails, see tests/parts.py) if no separate broker can be started."""
    if lacking := missing():
        do_without("kafka", f"{lacking}: {FIX}, or set {EXTERNAL} to host:port")
    try:
        class_path()
    except BrokerError as error:
        do_without("kafka", f"{error}: {FIX}")


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """Brokers shared by all tests: never stop these, and create topics again with tests.kafka_clients.make_topics."""
    if address := os.environ.get(EXTERNAL):
        yield External(address)
        return
    need_broker()
    with Broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="session")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with TLS and SCRAM, shared by all tests; its `security` has the files for it."""
    need_broker()
    if shutil.which("openssl") is None:
        do_without("kafka", f"no openssl: {FIX}")
    folder = tmp_path_factory.mktemp("secure")
    with Broker(folder / "broker", security=Security(folder / "security")) as broker:
        yield broker


@pytest.fixture
def new_broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Makes and starts separate brokers for one test, with the keywords of Broker; the test may stop or break them."""
    need_broker()
    with ExitStack() as stack:
        yield partial(_started, stack, tmp_path)


def _started(stack: ExitStack, folder: Path, name: str = "broker", **keywords: Any) -> Broker:
    broker = Broker(folder / name, **keywords)
    stack.callback(broker.close)
    stack.callback(broker.kill)  # first: an orderly stop takes 0.3 s, and this folder is not read again
    broker.start()
    return broker


@pytest.fixture
def own_broker(new_broker: Callable[..., Broker]) -> Broker:
    """A started separate broker for this test: it may be killed, frozen, or its disk filled."""
    return new_broker()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of loopback's own with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, made, both = folder / "key.pem", folder / "made.pem", folder / "both.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=loopback", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run(words, check=True, capture_output=True)
    both.write_text(made.read_text() + key.read_text())
    return both
