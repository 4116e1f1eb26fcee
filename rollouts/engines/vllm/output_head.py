"""Weights for vLLM on a CPU, where a checkpoint must hold a tied output head although it equals the embedding.

Models that tie the two leave the head out of their checkpoints. vLLM 0.32 on a CPU keeps a packed copy of the head for its products, which
loading new weights replaces only if the checkpoint has a tensor for it: otherwise the server continues with new layers under the old head,
and reports success.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollouts.engines.weights.checkpoint_check import HEAD, read_checkpoint_layout
from rollouts.errors import CheckpointError

_STAGE = "with_output_head_"
_EMBEDDING = "embed_tokens.weight"


def stage_output_head(directory: Path) -> Path | None:
    """Create a directory inside of this one with the same weights and the head; return None if the head is already there.

    The caller removes it after the load; each load has its own, because several servers may load at the same time. Raises CheckpointError
    if the embedding is not found, or the directory cannot be written to.
    """
    layout = read_checkpoint_layout(directory)
    if HEAD in layout.tensors:
        return None
    names = [name for name in layout.tensors if name.endswith(_EMBEDDING)]
    if len(names) != 1:
        raise CheckpointError(
            f"{directory} has no {HEAD}, and {len(names)} tensors that may be the embedding to use instead ({names[:3]}): on a CPU, vLLM "
            f"needs it. Export the weights with {HEAD}"
        )
    stage = None
    try:
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=directory))
        stage.chmod(directory.stat().st_mode)  # the server may run as another user
        for file in layout.files:
            (stage / file).symlink_to(Path("..", file))  # relative: the server may have the directory under another path
            with safe_open(directory / file, framework="pt") as opened:
                if names[0] in opened.keys():  # noqa: SIM118
                    save_file({HEAD: opened.get_tensor(names[0])}, stage / "output_head.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        raise CheckpointError(f"{directory} cannot be given an output head, which vLLM on a CPU needs to load it: {error}") from error
    return stage
