"""The adapters: who carries out acts. Each is one file with one class and one line in `ADAPTERS`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from pipeline.acts.adapters.adapter import Adapter
from pipeline.config.acts import Acts
from pipeline.model.errors import ConfigError

ADAPTERS: Mapping[str, str] = {
    "noop": "pipeline.acts.adapters.noop:Noop",
    "slurm": "pipeline.acts.adapters.slurm:Slurm",
    "slurmrestd": "pipeline.acts.adapters.slurmrestd:Slurmrestd",
    "kubernetes": "pipeline.acts.adapters.kubernetes:Kubernetes",
    "webhook": "pipeline.acts.adapters.webhook:Webhook",
    "exec": "pipeline.acts.adapters.programs:Programs",
}
"""Name in the configuration -> module and class, imported when it is used."""


def make_adapter(name: str, config: Acts) -> Adapter:
    """Returns the adapter with its part of the configuration. Raises ConfigError if that lacks something."""
    module, _, made = ADAPTERS[name].partition(":")
    try:
        found: Adapter = getattr(import_module(module), made)(config)
    except ModuleNotFoundError as error:
        raise ConfigError(f"[acts] adapter = {name!r}: needs {error.name}: pip install 'fleetpulse[{name}]'") from error
    return found
