"""Addresses of servers among the settings."""

from __future__ import annotations

from urllib.parse import urlsplit

from rollouts.errors import ConfigError, redact


def is_url(text: str) -> bool:
    """Whether a text is an address and not a path."""
    return text.lower().startswith(("http://", "https://"))


def strip_user(url: str) -> str:
    """Return an address without its user, its password and its query, for a message."""
    scheme, separator, place = url.rpartition("://")
    return scheme + separator + place.rpartition("@")[2].partition("?")[0]


def check_address(option: str, url: str, key_option: str) -> None:
    """Raise ConfigError for an address of a server that is none, or has a secret, which config.json and messages would show.

    Args:
        option: name of the setting, for the message.
        url: http://host:port.
        key_option: option with the name of the variable that holds the key of the server.
    """
    advice = "give http://host:port"
    if not is_url(url):
        raise ConfigError(f"{option} has {strip_user(url).lstrip('/')!r}, which has no scheme http or https: {advice}")
    if redact(url) != url:
        raise ConfigError(
            f"{option} has {redact(url)!r}, with a user, a password or a query, which the files and messages of a run would show: "
            f"{advice}, export the key as a variable, and name it by {key_option}"
        )
    shown = strip_user(url)  # alone: the text of an error may quote a part of a secret that redact() does not know
    try:
        parts = urlsplit(url)
        has_host, _ = bool(parts.hostname), parts.port  # a port that is no number is an error only when it is read
    except ValueError:
        raise ConfigError(f"{option} has {shown!r}, which is no address: {advice}") from None
    if not has_host:
        raise ConfigError(f"{option} has {shown!r}, which names no host: {advice}")
