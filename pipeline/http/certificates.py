"""TLS with certificates in files that keys of the configuration name. OpenSSL opens them by path and would wait at a
pipe for good, where no signal ends it."""

from __future__ import annotations

import ssl
from pathlib import Path

from pipeline.model.regular_files import open_regular


def trust(ca_file: Path | None) -> ssl.SSLContext:
    """Returns a client's context that trusts the certificates of a file, or those of the system. Raises OSError."""
    if ca_file is None:
        return ssl.create_default_context()
    with open_regular(ca_file) as opened:
        return ssl.create_default_context(cafile=opened)


def load_trusted(context: ssl.SSLContext, ca_file: Path) -> None:
    """Adds the certificates of a file to those that a context trusts. Raises OSError."""
    with open_regular(ca_file) as opened:
        context.load_verify_locations(opened)


def load_own(context: ssl.SSLContext, certificate_file: Path, key_file: Path | None) -> None:
    """Lets a context show the certificate of a file; None: the same file has its key. Raises OSError."""
    with open_regular(certificate_file) as chain:
        if key_file is None:
            context.load_cert_chain(chain)
        else:
            with open_regular(key_file) as key:
                context.load_cert_chain(chain, key)
