"""Access to a gateway: who may send it requests, and the session that an API key names."""

from __future__ import annotations

import hmac
import re
from functools import lru_cache
from hashlib import blake2b
from ipaddress import ip_address
from urllib.parse import urlsplit

from rollouts.errors import ConfigError
from rollouts.gateway.http.connections import HTTPRequest
from rollouts.gateway.refusals import Refusal

_KEY = re.compile(r"[A-Za-z0-9_.~-]{1,200}")


def check_access(http: HTTPRequest, token: str | None) -> None:
    """Refuse a request without the token (401); if there is none, one of a page in a browser (403), which anyone may have written.

    Such a page sends its origin, or names another host than this machine. Raises Refusal.
    """
    if token is not None:
        if not hmac.compare_digest(read_secret(http).partition(":")[0].encode(), token.encode()):
            message = "the API key is not the server's token (or, of a gateway, the token, a colon and a session's key)"
            raise Refusal(401, message, code="invalid_api_key")
        return
    host = http.headers.get("host", "")
    if "origin" in http.headers or not _is_loopback(host):
        raise Refusal(
            403,
            f"the request comes from a page of a browser, or was sent to the host {host!r:.100}: without a token this server answers "
            "programs that name it 127.0.0.1 or localhost (the setting token, --token-variable)",
            code="forbidden",
        )


def split_path(path: str) -> tuple[str | None, str]:
    """Return the key of a path's session, None without one, and the path behind it."""
    if path.startswith("/sessions/"):
        key, slash, rest = path[len("/sessions/") :].partition("/")
        return key, slash + rest
    return None, path


def read_secret(http: HTTPRequest) -> str:
    """Return a request's API key; "" without one."""
    given = http.headers.get("authorization", "")
    return given[7:] if given.lower().startswith("bearer ") else http.headers.get("x-api-key", "")


def digest_api_key(api_key: str) -> str:
    """Return the key of a session that an API key names: a digest, since a real one does not belong in names, ids and messages."""
    return f"key-{blake2b(api_key.encode(), digest_size=16).hexdigest()}"


def is_key(key: str) -> bool:
    """Whether a text can be a session's key."""
    return _KEY.fullmatch(key) is not None


def check_key(key: str) -> None:
    """Raise ConfigError for what cannot be a session's key."""
    if not is_key(key):
        raise ConfigError(f"{key!r:.100} is no key of a session: letters, digits and _ . ~ -, at most 200")


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine as programs on it do."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
