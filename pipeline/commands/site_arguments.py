"""The commands with which a site is set up and supported, with their options."""

from __future__ import annotations

from pipeline.commands.options import OUTPUT, option, parse_seconds

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

ROLES = ("node", "server", "one-host")
SITE: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "setup": (
        "ask four questions, write the configuration, and print the next commands",
        (
            option("--role", "what this host is", choices=ROLES),
            option("--site", "name of the site", metavar="NAME"),
            option("--kafka", "brokers, host:port,host:port; '' without a broker", metavar="SERVERS"),
            option("--gpus", "GPUs that each node must have; 0: not checked", type=int, metavar="N"),
            option("--webhook", "where alerts are sent; '' nowhere", metavar="URL"),
            option("--allow-http", "the webhook may be http, on a network that you trust", action="store_true"),
            option("--allow-private", "its private networks, such as 10.0.0.0/8,fd00::/8", metavar="NETWORKS"),
            option("--units", "installed by pip: also install the units of systemd, as root", action="store_true"),
            option(
                "--replace",
                "replace a configuration that exists; it is kept as FILE.old (FILE.old.2, ...)",
                action="store_true",
            ),
        ),
    ),
    "config": ("check, show or compare configurations", (OUTPUT,)),
    "doctor": (
        "find problems and suggest fixes",
        (
            option(
                "--wait",
                "repeat until no check fails, at most so long, such as 120s: a gate for upgrades",
                type=parse_seconds,
                metavar="TIME",
            ),
            OUTPUT,
        ),
    ),
    "support": (
        "write an archive for those who help you, without secrets",
        (option("target", "a new file, such as support.tar.gz", metavar="FILE"),),
    ),
}
