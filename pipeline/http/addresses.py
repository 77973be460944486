"""Names of this machine and names in HTTP headers: what a browser may be led to, and what it must not.

The one way in which our programs call an HTTP server with urllib, so that no secret leaves where it was sent.

No redirect is followed: urllib would carry the Authorization header to whatever host the answer names. A redirect is an
error of its status, as any other that is not 2xx. Proxies of the environment are not used either, unless asked for:
they are for the way out of the site, and would see a token of a call to this machine in clear.
"""

from __future__ import annotations

import ipaddress
import urllib.request
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether a listener on `host` is reached from this machine alone. A name other than localhost is not trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(url: str) -> str:
    """The host in a URL, in lower case without port or brackets; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def named(header: str) -> str:
    """The host in a Host header, likewise; the port may be a tunnel's."""
    return host_of(f"//{header}")


def same_origin(origin: str, header: str) -> bool:
    """Whether a page of this Origin was served under this Host header."""
    try:
        return urlsplit(origin).netloc == header
    except ValueError:
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def opener(
    *handlers: urllib.request.BaseHandler, environment_proxies_to: str | None = None
) -> urllib.request.OpenerDirector:
    """An opener without redirects, and without proxies but to a URL beyond loopback that is named."""
    outward = environment_proxies_to is not None and not is_loopback_url(environment_proxies_to)
    proxies = urllib.request.ProxyHandler(None if outward else {})
    return urllib.request.build_opener(proxies, _NoRedirect, *handlers)


def is_loopback_url(url: str) -> bool:
    """Whether a URL names this machine."""
    return is_loopback(host_of(url))
