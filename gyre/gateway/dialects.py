"""The wire forms that the gateway speaks, a closed list, and which of them a request is told in."""

from collections.abc import Mapping

from gyre.gateway.chat import ChatDialect
from gyre.gateway.dialect import Dialect
from gyre.gateway.messages import MessagesDialect
from gyre.gateway.responses import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (MessagesDialect(), ResponsesDialect(), ChatDialect())
"""The last one owns every path that no other does."""


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect of a request on a bare path; `headers` have lower-case names."""
    return next(dialect for dialect in DIALECTS if dialect.owns(path, headers))


def bare_path(path: str) -> str:
    """The path without query, trailing slash and any /v1 in front (clients put it there twice, once or never)."""
    path = "/" + path.split("?", 1)[0].strip("/")
    while path == "/v1" or path.startswith("/v1/"):
        path = path.removeprefix("/v1") or "/"
    return path
