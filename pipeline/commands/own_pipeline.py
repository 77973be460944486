"""Whether the pipeline that answers is that of the configuration: any other one may have its port.

`fleetpulse backup` compares the store. `fleetpulse node` may run on another host, through a tunnel or with a
configuration that has only [api], so it compares the site, if the configuration names one.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.config.layers import PREFIX
from pipeline.config.sections import Config, Site
from pipeline.http import client
from pipeline.model.errors import Refused


def check_store(config: Config, found: Path, site: str) -> None:
    """Raises Refused if the pipeline that answered has another store than the configuration."""
    expected = config.store.path.absolute()
    if not _is_same_file(found, expected):
        raise Refused(
            f"{client.base_url(config)}: the pipeline that answers (site {site}) has the store {found}; expected "
            f"{expected}, {_name_origin(config, 'store', 'path')}; nothing was copied; use the configuration of that "
            "pipeline (--config FILE), or correct [api] host and port"
        )


def check_site(config: Config) -> None:
    """Raises Refused if the configuration names a site and the pipeline that answers is of another one.

    No answer, or one of a version without this route, is left to the request that follows.
    """
    if config.site.name == Site().name:
        return
    status, answer = client.get(config, "/api/v1/version")
    found = answer.get("site") if status == 200 and isinstance(answer, dict) else None
    if found is not None and found != config.site.name:
        raise Refused(
            f"{client.base_url(config)}: the pipeline that answers is of site {found}; expected {config.site.name}, "
            f"{_name_origin(config, 'site', 'name')}; nothing was changed; use the configuration of that pipeline "
            "(--config FILE), or correct [api] host and port"
        )


def _is_same_file(first: Path, second: Path) -> bool:
    """Returns whether two paths lead to one file, also through links."""
    try:
        return first.samefile(second)
    except OSError:  # this user may not look at one of them, or it does not exist
        return first.resolve() == second.resolve()


def _name_origin(config: Config, section: str, key: str) -> str:
    """Returns what set a key: a variable of the environment, as in our containers, or the file."""
    variable = f"{PREFIX}{section}__{key}".upper()
    if variable in os.environ:
        return variable
    source = "the defaults, as no configuration was found" if config.source == "defaults" else config.source
    return f"[{section}] {key} of {source}"
