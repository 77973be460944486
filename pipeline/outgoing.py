"""The one way in which our programs call an HTTP server with urllib, so that no secret leaves where it was sent.

No redirect is followed: urllib would carry the Authorization header to whatever host the answer names. A redirect is an
error of its status, as any other that is not 2xx. Proxies of the environment are not used either, unless asked for:
they are for the way out of the site, and would see a token of a call to this machine in clear.
"""

from __future__ import annotations

import urllib.request

from pipeline.hosts import host_of, is_loopback


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
