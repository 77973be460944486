"""`fleetpulse pipeline`: the process, with its service, API, notifier and signals."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable

from pipeline.api.server import ApiServer, create_app, start_server
from pipeline.commands.burn_in import BurnInWatch
from pipeline.commands.first_compile import compile_first
from pipeline.commands.forgeries import ForgeryAudit
from pipeline.commands.objectives_keeper import ObjectivesKeeper
from pipeline.commands.open_transport import compile_reading
from pipeline.commands.pipeline import PipelineBackend, log
from pipeline.commands.service import PipelineService
from pipeline.commands.start_checks import check_next_start, check_receivers
from pipeline.config.origin import check_with_origin
from pipeline.config.sections import Config
from pipeline.engine.judge import Judge
from pipeline.incidents.audit import Outcome
from pipeline.model.errors import Interrupted
from pipeline.model.records import Caller
from pipeline.runtime.long_start import LongStart
from pipeline.runtime.reload import ACTION, AGAIN, Load, Reload
from pipeline.runtime.supervise import Stop
from pipeline.runtime.systemd import SystemdNotifier


def run(
    config: Config,
    judge: Judge,
    warm_up: Callable[[], None] = lambda: None,
    load_again: Load | None = None,
) -> int:
    """Runs the pipeline until SIGTERM or SIGINT, then stops within seconds. Returns reload.AGAIN after SIGHUP.

    warm_up: called in a thread before any input is read, while /readyz reports the start; a stop does not wait for it.
    load_again: reads the configuration.
    Raises ConfigError if it names a receiver that does not exist.
    """
    check_with_origin(config, lambda one: check_receivers(one, secrets=True))
    stop = Stop()
    ended = end_on_signals(stop)
    manager = SystemdNotifier()
    service = open_service(config, judge, stop, manager)
    if service is None:
        return 0
    backend = PipelineBackend(service)
    watches = (ObjectivesKeeper(service), ForgeryAudit(service), BurnInWatch(service))
    rounds = (backend.propose_acts, *(watch.run for watch in watches))
    api = start_server(create_app(backend, config), config, stop)
    hangup = watch_hangup(config, load_again, backend, stop, api, manager) if load_again else None
    service.each_round = (*rounds, *((hangup.poll,) if hangup else ()))
    where = f"store {config.store.path}, API http://{api.host}:{api.port}"
    print(f"fleetpulse pipeline: {where}", file=sys.stderr)  # noqa: T201 - a message of the command
    manager.notify_ready()
    manager.watch(lambda: service.progress.heartbeat.age_s, stop)
    notifier = threading.Thread(target=service.notifier.run, args=(stop,), name="notifier")
    notifier.start()
    if config.incidents.slurm_seconds:
        watch = (lambda: backend.people, stop)
        threading.Thread(target=backend.reservations.run, args=watch, name="slurm", daemon=True).start()
    try:
        compile_first((warm_up, lambda: compile_reading(config)), stop, service.progress.heartbeat.beat)
        service.run(stop)
    finally:
        stop.set()
        again = hangup is not None and hangup.accepted
        (manager.notify_reloading if again else manager.notify_stopping)()
        notifier.join()
        api.join()
        service.close()
        api.keep_listener(config.api)
    return AGAIN if again and not ended.is_set() else 0


def open_service(config: Config, judge: Judge, stop: Stop, manager: SystemdNotifier) -> PipelineService | None:
    """Opens the store, which may have to be backed up and migrated: hours for a large one, which the manager gives as
    long as there is progress. Returns None if `stop` was set during it; the store is as it was, or migrated."""
    start = LongStart(stop, manager)
    with start.extended():
        try:
            service: PipelineService | None = PipelineService(config, judge, start=start)
        except Interrupted as error:
            log.warning("%s; the next start begins this step again", error)
            service = None
        if service is not None and stop.is_set():
            service.close()
            service = None
    if service is None:
        manager.notify_stopping()
    return service


def end_on_signals(stop: Stop) -> threading.Event:
    """Lets SIGTERM and SIGINT set `stop`. Returns an event that only they set: a reload does not go on after them."""
    ended = threading.Event()

    def end(*_: object) -> None:
        ended.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return ended


def watch_hangup(
    config: Config, load: Load, backend: PipelineBackend, stop: Stop, api: ApiServer, manager: SystemdNotifier
) -> Reload:
    """Returns what answers SIGHUP: with a row of the audit, and if the change is accepted the end of the loop, before
    which the API is handed over."""

    def record(outcome: Outcome, reason: str) -> None:
        backend.people.record_audit(Caller("SIGHUP"), ACTION, config.source, reason, outcome)
        if outcome == "done":
            api.hand_over()
            stop.set()

    def load_checked() -> Config:
        fresh = load()
        check_next_start(config, fresh, (api.host, api.port))
        return fresh

    fixed = ("store.path", "site.name")
    return Reload("pipeline", config, load_checked, fixed, record, log.warning, manager.notify_configuration)
