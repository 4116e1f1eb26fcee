"""Data sets of the Hugging Face hub by name, and deadlines of requests at the hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, cast

from rollouts.errors import ConfigError, DataError

HUB_PREFIX = "hf://"
_ATTEMPTS = 3  # requests of a thread for the same in a row without an answer, after which a hub is given up


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A data set of the hub: hf://ORG/NAME[@REVISION][/CONFIGURATION][:SPLIT]."""

    name: str
    revision: str | None = None
    subset: str | None = None
    split: str | None = None


def parse_hub_name(text: str) -> HubName:
    """Parse hf://ORG/NAME[@REVISION][/CONFIGURATION][:SPLIT]; names of one word, as hf://NAME, have no configuration.

    Raises: ConfigError for anything else.
    """
    body, _, split = text.removeprefix(HUB_PREFIX).partition(":")
    words = body.split("/")
    at = min(1, len(words) - 1)  # the word that ends the name
    last, _, revision = words[at].partition("@")
    subset = "/".join(words[at + 1 :])
    if not all(words[: at + 1]) or not last or len(words) > 3 or (":" in text.removeprefix(HUB_PREFIX) and not split):
        raise ConfigError(f"{text!r} is no name of a data set of the hub: expected hf://ORG/NAME[@REVISION][/CONFIGURATION][:SPLIT]")
    return HubName(name="/".join([*words[:at], last]), revision=revision or None, subset=subset or None, split=split or None)


@contextmanager
def limit_requests(least_s: float = 0.0) -> Generator[None]:
    """Limit each request of huggingface_hub in the block to HF_HUB_DOWNLOAD_TIMEOUT seconds without a byte.

    Without it, a hub that accepts a connection and never answers is waited for without end. A request that has no answer three times
    raises TimeoutError; the packages would repeat it for minutes.

    Args:
        least_s: lower bound, for requests that a hub works at for long, such as a commit.
    """
    from huggingface_hub import constants, get_session

    seconds = max(float(constants.HF_HUB_DOWNLOAD_TIMEOUT), least_s)
    client: Any = get_session()
    unanswered = Counter[str]()

    def name_request(request: Any) -> str:  # threads that download at once may ask for the same
        return f"{get_ident()} {request.method} {request.url}"

    def limit(request: Any) -> None:
        asked = name_request(request)
        if unanswered[asked] == _ATTEMPTS:
            told = f"the hub {constants.ENDPOINT} has not answered within {seconds:g} s (HF_HUB_DOWNLOAD_TIMEOUT), {_ATTEMPTS} times"
            raise TimeoutError(told)
        unanswered[asked] += 1
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {name: min(given.get(name) or seconds, seconds) for name in ("connect", "read", "write", "pool")}

    def note(response: Any) -> None:
        del unanswered[name_request(response.request)]

    hooks = client.event_hooks
    client.event_hooks = {"request": [*hooks["request"], limit], "response": [note, *hooks["response"]]}
    try:
        yield
    finally:  # a block of another thread may have begun since, and has hooks of its own
        client.event_hooks = {kind: [hook for hook in hooks if hook not in (limit, note)] for kind, hooks in client.event_hooks.items()}


def load_from_hub(hub: HubName, subset: str | None, split: str, name: str, hf: Any) -> Any:
    """Load a split of a data set of the hub; offline from the files in the cache of the hub, else from the cache of `datasets`.

    Args:
        name: the whole name, for errors.
        hf: the module `datasets`.

    Raises: DataError if it is not in the cache, offline, or a request at the hub fails; OSError, also TimeoutError, ValueError or an error
        of `datasets` otherwise.
    """
    if not hf.config.HF_HUB_OFFLINE:
        from huggingface_hub import constants, errors

        try:
            with limit_requests():
                return hf.load_dataset(hub.name, subset, split=split, revision=hub.revision)
        except cast("Any", errors).HTTPError as error:  # httpx's errors are no OSError
            limit = f"within {constants.HF_HUB_DOWNLOAD_TIMEOUT:g} s (HF_HUB_DOWNLOAD_TIMEOUT)"
            raise DataError(
                f"{name} cannot be loaded: the hub {constants.ENDPOINT} has refused a request, or not answered it {limit}: {error}"
            ) from error
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(hub.name, repo_type="dataset", revision=hub.revision, local_files_only=True)
    except LocalEntryNotFoundError:
        folder = hub.name
    try:
        return hf.load_dataset(folder, subset, split=split, **({} if folder != hub.name else {"revision": hub.revision}))
    except (ConnectionError, FileNotFoundError) as error:
        raise DataError(
            f"{name} is not in the local cache, and HF_HUB_OFFLINE is set, so that nothing is downloaded: set HF_HUB_OFFLINE=0 to download "
            f"it, or download it before (hf download --repo-type dataset {hub.name})"
        ) from error
