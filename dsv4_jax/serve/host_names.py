"""HostNames: by which names a server may be called, and which sites' pages may use it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import Scope

from dsv4_jax.serve.errors import ApiError

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._~-]+))(?::([0-9]{0,5}))?")
"""A host, the address within brackets or the name, and a port; there may be none."""

_PORTS = {"http": 80, "https": 443}

_READING = ("GET", "HEAD")
"""Methods by which a link of another site is followed."""


class HostNames:
    """What `Host` and `Origin` of a request must say.

    A browser lets a page read what comes from the host that the page came from. A name can be made
    to point to this machine after its page was loaded, and the page then passes for this server's
    own, but for `Host`, which still has the name. So names are refused unless they are known: those
    of loopback, the address at which the connection came in, and those that the server is told.

    Pages of other sites can send requests too, though not read what comes. `Origin` says where such
    a page is from: it must be the host and port that the request is for, or one of the names that
    the server is told, on any port. Programs other than browsers send none.
    """

    def __init__(self, allowed: Iterable[str], listens_at: str = "") -> None:
        """Names of one server.

        Args:
          allowed: what `read_pattern` takes.
          listens_at: the name or address that the server listens at.

        Raises:
          ValueError: one of the allowed names is none.
        """
        self._allowed = [read_pattern("allowed_hosts", pattern) for pattern in allowed]
        self._sites = [pattern for pattern in self._allowed if pattern != "*"]
        self._listens_at = _canonical(listens_at)

    def check_host(self, scope: Scope) -> None:
        """Refuses a request for another host.

        Raises:
          ApiError: of status 400 if there is no host or several, and of 403 if it is another one.
        """
        hosts = _values(scope, b"host")
        if not hosts and scope["http_version"] == "1.0":
            return  # it knows no Host, and no browser speaks it
        if len(hosts) != 1 or (host := _split(hosts[0])) is None:
            raise ApiError(400, "there must be one header Host, with a name or address and a port")
        name = host[0]
        if not (
            _is_loopback(name)
            or name in (self._listens_at, _canonical((scope.get("server") or ("",))[0] or ""))
            or _matches(name, self._allowed)
        ):
            raise ApiError(
                403,
                f"this server is not called {name[:100]!r}: start it with --allowed-host "
                f"{name[:100]} if it is",
            )

    def check_origin(self, scope: Scope) -> None:
        """Refuses a request of another site's page.

        Raises:
          ApiError: of status 403.
        """
        origins = _values(scope, b"origin")
        if not origins:
            # Old browsers leave it out at times; newer ones say this in any case.
            relation = _values(scope, b"sec-fetch-site")
            is_foreign = relation and relation[0] not in ("same-origin", "none")
            if is_foreign and scope["method"] not in _READING:
                raise ApiError(403, "pages of other sites cannot use this server")
            return
        host = _split("".join(_values(scope, b"host")))
        if len(origins) != 1 or not self._is_own(origins[0], host):
            raise ApiError(
                403,
                f"pages of {origins[0][:100]!r} cannot use this server: start it with "
                "--allowed-host and the name of their site if they may",
            )

    def _is_own(self, origin: str, host: tuple[str, int | None] | None) -> bool:
        scheme, _, authority = origin.partition("://")
        site = _split(authority)
        if site is None:  # such as "null", of a page without a site
            return False
        name, port = site
        if _matches(name, self._sites):
            return True
        usual = _PORTS.get(scheme)
        return host is not None and (name, port or usual) == (host[0], host[1] or usual)


def read_pattern(argument: str, pattern: str) -> str:
    """A name or address, `*.` and a name for all that end with it, or `*` for every host.

    Raises:
      ValueError: it is something else; the message calls it by the argument's name.
    """
    if pattern == "*":
        return pattern
    name = pattern.removeprefix("*.")
    split = _split(f"[{name}]" if name.count(":") > 1 and name[0] != "[" else name)
    if split is None or split[1] is not None or (name != pattern and _address(split[0])):
        raise ValueError(
            f"{argument} must be a name or an address without a port, such as llm.example.com, "
            f"*.example.com or ::1, or * for every name, got {pattern!r}"
        )
    return pattern[: len(pattern) - len(name)] + split[0]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(
        name == pattern or (pattern[0] == "*" and name.endswith(pattern[1:]))
        for pattern in patterns
    )


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for name, value in scope["headers"] if name == wanted]


def _split(authority: str) -> tuple[str, int | None] | None:
    """The host of `host:port` in its one spelling, and the port; None if it is none."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return None
    address, name, port = match.groups()
    if address is not None and _address(address) is None:
        return None
    canonical = _canonical(address or name)
    return (canonical, int(port) if port else None) if canonical else None


def _canonical(name: str) -> str:
    """The one spelling of a name or an address."""
    address = _address(name.partition("%")[0])  # the zone of a link is not sent
    return str(address) if address else name.lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address; one of IPv4 that is written as one of IPv6 is that of IPv4."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" if address is None else address.is_loopback
