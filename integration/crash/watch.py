"""CrashWatch: records the updates of a stage, and writes a crash bundle when a bad number ends it."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
import trio

from integration.crash.bundle import WEIGHTS, CrashBundle, find_places, write_bundle
from integration.crash.recorder import RecordedUpdate, UpdateRecorder
from integration.settings.command_line import CONFIG_FILE
from integration.settings.help_text import name_as_started
from integration.settings.paths import with_absolute_paths
from rollouts.backends.protocol import BackendFeature, TrainingBackend, require_backend_feature
from rollouts.config_files import save_config
from rollouts.errors import BadNumberError, CheckpointError, OutputError, make_safe, redact
from rollouts.models.loading import find_device_name
from rollouts.output_files import is_disk_full
from rollouts.training.saving.checkpoints import checkpoint_name, directory_size, list_checkpoints, save_checkpoint, verify_checkpoint
from rollouts.types import TrainBatch

CRASHES = "crash"
"""Subdirectory of a stage with its crash bundles."""
KEEP_LAST_N = 3
SHARE_OF_FREE = 0.25
"""Largest share of the free space that the weights of a bundle take with crash_bundles "auto"."""
_PACKAGES = (
    "rollouts-rl", "torch", "transformers", "tokenizers", "numpy", "safetensors", "trio", "tyro", "peft", "kernels", "flash-attn", "triton",
    "bitsandbytes", "jax", "jaxlib", "optax",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(OMP|MKL|OPENBLAS)_NUM_THREADS|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG|PYTORCH_(CUDA_)?ALLOC_CONF|"
    r"PYTHONHASHSEED|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|XLA_FLAGS|JAX_PLATFORMS|NCCL_(ALGO|PROTO|DEBUG|P2P_DISABLE)|"
    r"RANK|WORLD_SIZE|LOCAL_RANK"
)


def describe_versions() -> dict[str, str]:
    """Return the versions of the packages that numbers depend on, of those that are installed."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def describe_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an allow-list, without credentials."""
    return {name: make_safe(redact(value)) for name, value in sorted(variables.items()) if _VARIABLES.fullmatch(name)}


def describe_machine(device: str) -> dict[str, Any]:
    """Return what numbers depend on besides packages: Python, platform, device, threads, precision of matrix products."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") and torch.cuda.is_available() else device,
        "num_threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@dataclass(frozen=True)
class _Weights:
    """Weights of a bundle: fields of CrashBundle, and the updates to execute from them."""

    weights: str
    weights_from: str | None
    updates: tuple[RecordedUpdate, ...]


class CrashWatch:
    """Watch over the backends of a stage."""

    def __init__(
        self,
        directory: Path,
        stage: str,
        config: Any,
        backends: Mapping[str, TrainingBackend | None],
        *,
        num_processes: int = 1,
    ) -> None:
        """
        Args:
            directory: directory of the stage; its subdirectory CRASHES gets the bundles.
            config: settings of the run, Config or RewardModelConfig.
            backends: policy and critic, before they are opened as pipelines; their updates are recorded from now on. None = there is no
                such backend.
            num_processes: processes that train together.
        """
        self._directory, self._stage, self._config, self._num_processes = directory / CRASHES, stage, config, num_processes
        self._start: Path | None = None
        self._max_tokens: int | None = None
        kept = {} if config.crash_bundles == "none" else backends
        self._recorders = {role: UpdateRecorder(backend) for role, backend in kept.items() if backend is not None}

    def begin_from(self, start: Path | None, max_tokens: int | None = None) -> CrashWatch:
        """Set what bundles tell of the stage besides its settings, and return the watch.

        Args:
            start: directory of the model that the stage began with; None = that of the settings.
            max_tokens: token budget of a response, in RL.
        """
        self._start, self._max_tokens = start, max_tokens
        return self

    @asynccontextmanager
    async def guard(self, policy: TrainingBackend, critic: TrainingBackend | None = None) -> AsyncGenerator[None]:
        """Write a bundle if a BadNumberError ends the block, and note it on the error, which is raised in any case.

        Args:
            policy, critic: the open pipelines of the recorded backends.
        """
        try:
            yield
        except BaseException as raised:
            error = next((found for found in _flatten(raised) if isinstance(found, BadNumberError)), None)
            if error is not None and error.step is not None and self._recorders:
                with trio.CancelScope(shield=True):
                    await self._try_write(error, error.step, {"policy": policy, "critic": critic})
            raise

    async def _try_write(self, error: BadNumberError, step: int, pipelines: Mapping[str, TrainingBackend | None]) -> None:
        """Write the bundle, and note it on the error. Nothing that goes wrong here may hide the error."""
        try:
            path, weights = await self._write(error, step, pipelines)
        except Exception as problem:
            error.add_note(f"a crash bundle could not be written: {type(problem).__name__}: {problem}")
            return
        if path is None:
            error.add_note("there is no crash bundle: the batch of this step is not known")
            return
        kept = f"the step is kept in the crash bundle {path}"
        with suppress(OSError):  # a file that vanishes meanwhile
            kept += f" ({await trio.to_thread.run_sync(directory_size, path) / 1e6:.1f} MB)"
        command = name_as_started(f"python -m integration.train --replay {shlex.quote(str(path))}")
        again = f"; to execute it again on one process:\n    {command}" if weights != "lost" else ", without weights, which are lost"
        error.add_note(kept + again)

    async def _write(self, error: BadNumberError, step: int, pipelines: Mapping[str, TrainingBackend | None]) -> tuple[Path | None, str]:
        """Write the bundle; return its directory, None without a batch, and what it says of the weights."""
        role = next((name for name, recorder in self._recorders.items() if recorder.error is error), "policy")
        backend, recorder = pipelines[role], self._recorders.get(role)
        if backend is None or recorder is None or (recorder.failed is None and error.batch is None):
            return None, "lost"
        bundle = self._describe(error, step, role, recorder)
        path = self._directory / checkpoint_name(step)
        logging.getLogger(__name__).error("%s\nwriting a crash bundle to %s", bundle.message, path)  # the run may be killed meanwhile
        for choice in self._list_weights(error, recorder):
            if not await trio.to_thread.run_sync(self._is_possible, choice, recorder):
                continue
            try:
                return await self._save(backend, replace(bundle, **vars(choice))), choice.weights
            except (CheckpointError, OutputError, OSError) as problem:  # without room for the weights there may be room for the rest
                if choice.weights != "saved" or not (is_disk_full(problem) or choice.weights_from is not None):
                    raise
        raise AssertionError("the last choice is written or raises")

    def _is_possible(self, choice: _Weights, recorder: UpdateRecorder) -> bool:
        """Whether the weights of a choice are there, and have room. Reads a whole checkpoint if they are those of one."""
        if choice.weights_from is not None:
            return _is_whole(Path(choice.weights_from))
        if choice.weights != "saved" or self._config.crash_bundles != "auto":
            return True
        size = recorder.estimate_checkpoint(None if recorder.base is None else _locate(recorder.base))
        return size is None or size <= SHARE_OF_FREE * count_free_bytes(self._directory)

    def _describe(self, error: BadNumberError, step: int, role: str, recorder: UpdateRecorder) -> CrashBundle:
        rows = cast("TrainBatch | None", error.batch) if recorder.failed is None else None
        calls = () if recorder.failed is None else recorder.failed.calls
        last = rows if rows is not None else calls[-1].batch if calls else None
        return CrashBundle(
            stage=self._stage,
            step=step,
            role=role,
            message=make_safe(redact(str(error))),
            kind=error.kind,
            numbers=error.numbers,
            places=[] if last is None else find_places(last),
            max_tokens=self._max_tokens,
            weights="lost",
            weights_from=None,
            start=None if self._start is None else str(self._start.absolute()),
            num_processes=self._num_processes,
            versions=describe_versions(),
            environment=describe_environment(os.environ),
            machine=describe_machine(find_device_name(self._config.model.device)),
            rows=rows,
        )

    def _list_weights(self, error: BadNumberError, recorder: UpdateRecorder) -> list[_Weights]:
        """List the weights that a bundle may be written with, the best first; whether they are there is not looked at."""
        failed = () if recorder.failed is None else (recorder.failed,)
        found: list[_Weights] = []
        if (
            error.kind != "parameter" and self._config.crash_bundles != "linked"
        ):  # the update was not applied, so the weights in memory are those before it
            found.append(_Weights("saved", None, failed))
        updates = (*recorder.updates, *failed)
        if recorder.is_complete and recorder.base is None:
            found.append(_Weights("start", None, updates))
        elif recorder.is_complete and recorder.base is not None:
            base = str(_locate(recorder.base))
            found += [_Weights("saved", base, updates), _Weights("named", base, updates)]
        return [*found, _Weights("lost", None, failed)]

    async def _save(self, backend: TrainingBackend, bundle: CrashBundle) -> Path:
        """Write the directory of a bundle, and delete older ones than the last few."""
        content: dict[str, Any] = {}

        async def write(directory: Path) -> None:
            content.update(await trio.to_thread.run_sync(write_bundle, directory, bundle))  # first: it reads metrics from the backend
            await trio.to_thread.run_sync(save_config, with_absolute_paths(self._config), directory / CONFIG_FILE)
            if bundle.weights == "saved" and bundle.weights_from is not None:
                await trio.to_thread.run_sync(_link, Path(bundle.weights_from), directory / WEIGHTS, self._config.crash_bundles == "full")
            elif bundle.weights == "saved":
                (directory / WEIGHTS).mkdir()
                saver = require_backend_feature(backend, BackendFeature.CHECKPOINTS, "a crash bundle")
                await saver.save_checkpoint(directory / WEIGHTS).result()

        older = list_checkpoints(self._directory)
        path = await save_checkpoint(self._directory, bundle.step, write=write, run_state=content, keep_last_n=1, protected=older)
        await trio.to_thread.run_sync(remove_old, self._directory)
        return path


def remove_old(directory: Path, keep_last_n: int = KEEP_LAST_N) -> None:
    """Delete the bundles of a directory beyond the last written ones."""
    written = sorted(list_checkpoints(directory), key=lambda path: path.stat().st_mtime_ns)
    for path in written[:-keep_last_n]:
        doomed = path.with_name(f".tmp_deleted_{path.name}_{time.time_ns()}")  # a kill in between leaves no half bundle
        path.rename(doomed)
        shutil.rmtree(doomed)


def count_free_bytes(directory: Path) -> int:
    """Return the free bytes of the file system of a directory, which need not be there yet."""
    return shutil.disk_usage(next(path for path in (directory, *directory.absolute().parents) if path.is_dir())).free


def _locate(written: Path) -> Path:
    """Return the final path of a checkpoint, or its part, that was written into a temporary directory or loaded."""
    return Path(
        *(match.group() if name.startswith(".tmp_") and (match := re.search(r"step_\d+", name)) else name for name in written.parts)
    )


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint, or its part, is complete."""
    whole = next((place for place in (path, path.parent) if place.name.startswith("step_")), None)
    if whole is None or not path.is_dir():
        return False
    try:
        verify_checkpoint(whole)
    except CheckpointError:
        return False
    return True


def _link(source: Path, target: Path, may_copy: bool) -> None:
    """Copy a directory by links, which take no room; files that cannot be linked are copied, or raise OSError."""

    def link(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            if not may_copy:
                raise
            shutil.copy2(file, to)

    shutil.copytree(source, target, copy_function=link)


def _flatten(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _flatten(inner)
    else:
        yield error
