"""Models of the Hugging Face hub by name: their files in the local cache, downloaded where they are not there yet."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollouts.config_files import suggest
from rollouts.data.rows.hub import limit_requests
from rollouts.errors import ConfigError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Form of a model's name on the hub: ORG/NAME."""

_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # configuration, tokenizer, chat template
_CODE = ("*.py",)
_WEIGHTS = ("*.safetensors",)
_OLD_WEIGHTS = ("*.bin",)
_SUBFOLDERS = ("*/*",)  # the same weights once more, in other formats


@dataclass(frozen=True)
class HubModel:
    """A model of the hub in the local cache."""

    name: str  # ORG/NAME
    commit: str  # commit of the repository, 40 hex digits
    directory: Path  # its files; loads as any model directory


def is_hub_name(path: str | Path) -> bool:
    """Whether a path is the name of a model on the hub: of the form ORG/NAME, and nothing on this machine's disk.

    A path whose first folder exists is a mistyped path, not a name.
    """
    text = str(path)
    return HUB_NAME.fullmatch(text) is not None and not Path(text).exists() and not Path(text).parent.is_dir()


def find_hub_model(
    name: str, revision: str | None = None, *, weights: bool = True, trust_remote_code: bool = False, option: str = "model.path"
) -> HubModel:
    """Return a model of the hub; files that the local cache lacks are downloaded.

    The variables of huggingface_hub hold: HF_HUB_OFFLINE=1 asks the cache alone, HF_HOME and HF_HUB_CACHE say where it is, HF_ENDPOINT
    names another hub, and HF_TOKEN, or `hf auth login`, gives access to private and gated models.

    Args:
        name: ORG/NAME.
        revision: branch, tag or commit; None = main.
        weights: False = only configuration and tokenizer.
        trust_remote_code: also the Python files of the model.
        option: setting that named the model, for errors.

    Raises: ConfigError saying whether the name or the revision is unknown, access is missing, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_DESCRIPTION, *(_CODE if trust_remote_code else ()), *(_WEIGHTS if weights else ())]

    def download(wanted: list[str], at: str | None) -> Path:
        return Path(snapshot_download(name, revision=at, allow_patterns=wanted, ignore_patterns=list(_SUBFOLDERS)))

    found = _explain(lambda: download(patterns, revision), name, revision, option)
    if weights and not list(found.glob("*.safetensors")):
        found = _explain(lambda: download([*patterns, *_OLD_WEIGHTS], found.name), name, revision, option)
    return HubModel(name, found.name, found)


def list_cached_models() -> list[str]:
    """Return the names of the models in the local cache."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*")
    return sorted({"/".join(folder.parents[1].name.split("--", 2)[1:]) for folder in folders})


def _explain(download: Callable[[], Path], name: str, revision: str | None, option: str) -> Path:
    """Call a download, and raise its errors as ConfigError."""
    from huggingface_hub import errors

    try:
        with limit_requests():
            return download()
    except (cast("Any", errors).HTTPError, OSError, ValueError) as error:
        here = f"{option} is {name!r}" + ("" if revision is None else f", revision {revision!r}")
        raise ConfigError(f"{here}, {_tell_cause(error, name)}") from error


def _tell_cause(error: Exception, name: str) -> str:
    """Say why a download failed, and what to do."""
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub import errors as hub

    causes = (error, error.__cause__, error.__context__)

    def is_one_of(*kinds: type[Exception]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if is_one_of(hub.GatedRepoError):
        return (
            f"whose owners ask for consent to their terms: accept them at {constants.ENDPOINT}/{name}, then run `hf auth login`, or set "
            "HF_TOKEN to a token of that account"
        )
    if is_one_of(hub.RevisionNotFoundError):
        return "which the model on the hub does not have: give a branch, a tag or a commit, or leave --model.revision out"
    status = next((cause.response.status_code for cause in causes if isinstance(cause, hub.HfHubHTTPError)), None)
    if is_one_of(hub.RepositoryNotFoundError) or status == 401:  # the hub's answer for a name that is unknown or private
        return (
            f"but there is no such directory here, and no such model on {constants.ENDPOINT}: check the spelling; for a private model run "
            "`hf auth login`, or set HF_TOKEN"
        )
    if is_one_of(hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError, hub.IncompleteSnapshotError, TimeoutError):
        limit = f"cannot be reached, or does not answer within {constants.HF_HUB_DOWNLOAD_TIMEOUT:g} s (HF_HUB_DOWNLOAD_TIMEOUT)"
        why = "HF_HUB_OFFLINE forbids a download" if is_offline_mode() else f"{constants.ENDPOINT} {limit}"
        cached = list_cached_models()
        return (
            f"but there is no such directory here, the local cache {constants.HF_HUB_CACHE} lacks files of it, and {why}; the cache has "
            f"{'no model' if not cached else f'other models: {suggest(name, cached)}'}. Download it where there is a network "
            f"(`hf download {name}`), or give the path of a model directory"
        )
    return f"but the hub {constants.ENDPOINT} did not give it: {next(iter(str(error).strip().splitlines()), repr(error))}"
