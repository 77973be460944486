"""Whether the part that runs in this container is alive, for HEALTHCHECK: exit status 0 or 1.

Pipeline and dashboard must answer where their configuration says that they listen; alive, not ready: a pipeline that
waits for its broker is not helped by a restart. Other parts have no port: they are alive while they run.
"""

import itertools
import sys
import urllib.request
from pathlib import Path

TIMEOUT_S = 4
LOOPBACK = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
"""Where to ask a part that listens on all addresses."""


def find_address(words: list[str]) -> str | None:
    """Returns the address of the part that a command starts; None for one without a port. Raises ConfigError."""
    part = next((word for word in words if word in ("pipeline", "dashboard")), None)
    if part is None:
        return None
    from pipeline.config.sections import load_config

    named = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    named += [after for word, after in itertools.pairwise(words) if word == "--config"]
    config = load_config(named[-1] if named else None)
    section, path = (config.api, "/healthz") if part == "pipeline" else (config.dashboard, "/_stcore/health")
    host = LOOPBACK.get(section.host, section.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{section.port}{path}"


def ask(words: list[str]) -> None:
    """Asks the part that a command starts. Raises OSError if it is not alive, ConfigError."""
    address = find_address(words)
    if address is not None:
        request = urllib.request.Request(address, headers={"Host": "localhost"})
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S).close()


if __name__ == "__main__":
    try:
        # with `docker run --init` process 1 is another one, whose words end with those of ours
        ask(Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0"))
    except Exception as error:  # noqa: BLE001 - whatever it is, the part is not alive
        sys.exit(f"{type(error).__name__}: {error}")
