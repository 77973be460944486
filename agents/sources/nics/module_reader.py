"""Reads the modules of ports: through netlink where the kernel has it, else through the ioctl."""

from __future__ import annotations

import errno

from agents.sources.nics.ethtool_calls import Ethtool
from agents.sources.nics.ethtool_netlink import EthtoolNetlink
from agents.sources.nics.modules import CMIS_MODULES, SFP, Module, parse

_DIAGNOSTICS = 0x51  # SFF-8472: A2h on the bus, without the bit for reading


class ModuleReader:
    """Asks for one module at a time. `refusal` names the right that is missing, once the kernel said so."""

    def __init__(self, calls: Ethtool, netlink: EthtoolNetlink | None) -> None:
        self._calls, self._netlink = calls, netlink
        self.refusal = ""

    @classmethod
    def opened(cls, calls: Ethtool) -> ModuleReader:
        """A reader with what this kernel has."""
        try:
            return cls(calls, EthtoolNetlink())
        except OSError:  # before Linux 5.6, or a sandbox without netlink: the ioctl is left
            return cls(calls, None)

    def close(self) -> None:
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    def read(self, interface: str) -> Module:
        """Raises OSError where there is no module, the driver cannot read it or we may not."""
        try:
            return self._by_netlink(self._netlink, interface) if self._netlink else self._by_ioctl(interface)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                self.refusal = "module memory not readable: add CAP_NET_ADMIN"
            raise

    def _by_ioctl(self, interface: str) -> Module:
        _, memory = self._calls.module(interface)
        return parse(memory)

    @staticmethod
    def _by_netlink(netlink: EthtoolNetlink, interface: str) -> Module:
        memory = netlink.page(interface, 0, offset=0)
        if memory[:1] and memory[0] in SFP:
            memory += netlink.page(interface, 0)
            if len(memory) == 256 and memory[92] & 0x40:  # SFF-8472 table 8-5: diagnostics are there
                memory += netlink.page(interface, 0, _DIAGNOSTICS, offset=0) + bytes(128)
            return parse(memory)
        memory += netlink.page(interface, 0)
        if memory[:1] and memory[0] in CMIS_MODULES and len(memory) == 256 and not memory[2] & 0x80:
            return parse(memory, netlink.page(interface, 1), netlink.page(interface, 0x11))
        return parse(memory)
