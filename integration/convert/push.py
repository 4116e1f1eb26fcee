"""Publishing of a model directory on the Hugging Face hub. The token is huggingface_hub's affair: it is neither read nor written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rollouts.data.rows.hub import limit_requests
from rollouts.errors import ConfigError, RolloutsError
from rollouts.models.hub import HUB_NAME

_PUSH_S = 300.0
"""Seconds without a byte after which a push is given up, if HF_HUB_DOWNLOAD_TIMEOUT is not longer: a large commit takes the hub long."""


def check_push(name: str) -> None:
    """Raise ConfigError if nothing can be published under a name: its form, no token, no network. Asks the hub nothing."""
    from huggingface_hub import constants, get_token, is_offline_mode

    if HUB_NAME.fullmatch(name) is None:
        raise ConfigError(f"--push-to-hub is {name!r}, expected the name of a model on the hub: ORG/NAME, or USER/NAME")
    if is_offline_mode():
        raise ConfigError("--push-to-hub needs the hub, and HF_HUB_OFFLINE=1 forbids it: unset one of them")
    if get_token() is None:
        raise ConfigError(
            f"--push-to-hub writes to {constants.ENDPOINT}, and there is no token: run `hf auth login`, or set HF_TOKEN to a token "
            "that may write"
        )


def push_model(directory: Path, name: str, *, private: bool = True) -> str:
    """Upload a model directory as one commit, and return its address.

    Args:
        private: visibility of a model that is new on the hub; an existing one keeps its own.

    Raises: RolloutsError if the hub refuses it; the directory is as it was, and can be pushed again.
    """
    from huggingface_hub import HfApi, errors

    api = HfApi()
    try:
        with limit_requests(_PUSH_S):
            address = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=directory, commit_message="Trained by rollouts")
    except (cast("Any", errors).HTTPError, OSError, ValueError) as error:
        told = next(iter(str(error).strip().splitlines()), repr(error))
        raise RolloutsError(
            f"{name} could not be written on the hub ({told}): the model is in {directory}; `hf upload {name} {directory}` pushes it again"
        ) from error
    return str(address)
