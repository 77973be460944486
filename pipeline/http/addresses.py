"""Host names and the one way to call HTTP servers with urllib, so that no secret reaches another server.

Redirects are not followed, because urllib would send the Authorization header to the new host: a redirect is an error
of its status. Proxies of the environment are not used unless requested: they are for external addresses, and would see
tokens of local calls.
"""

from __future__ import annotations

import ipaddress
import urllib.request
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Returns whether `host` is reachable only from this machine. Names other than localhost are not trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_host(url: str) -> str:
    """Returns the host of a URL in lower case, without port or brackets; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def parse_host_header(header: str) -> str:
    """Returns the host of a Host header in lower case, without the port, which may be a tunnel's."""
    return parse_host(f"//{header}")


def is_same_origin(origin: str, header: str) -> bool:
    """Returns whether an Origin matches a Host header."""
    try:
        return urlsplit(origin).netloc == header
    except ValueError:
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follows no redirect: the response stays an error."""
        return


def make_opener(
    *handlers: urllib.request.BaseHandler, environment_proxies_to: str | None = None
) -> urllib.request.OpenerDirector:
    """Returns an opener without redirects. environment_proxies_to: a URL beyond loopback that may use proxies."""
    outward = environment_proxies_to is not None and not is_loopback_url(environment_proxies_to)
    proxies = urllib.request.ProxyHandler(None if outward else {})
    return urllib.request.build_opener(proxies, _NoRedirect, *handlers)


def is_loopback_url(url: str) -> bool:
    """Returns whether a URL names this machine."""
    return is_loopback(parse_host(url))
