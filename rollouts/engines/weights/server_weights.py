"""ServerWeights: checks and updates of one server's weights, the same for SGLang and vLLM."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from rollouts.engines.http.checks import INITIAL_LABEL, ServerInfo
from rollouts.engines.http.endpoint import Deadlines
from rollouts.engines.http.requests import RequestsInFlight
from rollouts.engines.http.samples import version_of
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.engines.weights.checkpoint_check import (
    CheckpointLayout,
    check_checkpoint,
    check_tensors,
    expect_dtype,
    read_fingerprint,
    read_reference,
    read_weight_version,
)
from rollouts.engines.weights.path_map import PathMap
from rollouts.engines.weights.transaction import ServedDirectory, ServerControls, WeightTransaction
from rollouts.errors import CheckpointError, EngineError
from rollouts.weight_specs import WeightSpec


class ServerWeights:
    """Weights of one server: new ones are compared with a reference before the server is told of them. Used after open()."""

    def __init__(
        self,
        requests: RequestsInFlight,
        controls: ServerControls,
        paths: PathMap,
        reference: CheckpointLayout | None,
        *,
        deadlines: Deadlines | None = None,
        allow_cast: bool,
    ) -> None:
        """
        Args:
            requests: requests of the engine; held while an update runs.
            controls: operations of the server.
            paths: map from local directories to those of the server.
            reference: layout of the served model; None = that of its directory or, if it cannot be read from here, of the first weights
                that are loaded.
            deadlines: those of WeightTransaction.
            allow_cast: whether new weights may have another floating-point precision than the reference.
        """
        self._name = requests.name
        self._requests = requests
        self._controls = controls
        self._deadlines = deadlines
        self._paths = paths
        self._reference = reference
        self._allow_cast = allow_cast
        self._transaction: WeightTransaction | None = None
        self._can_sleep = False

    async def open(self, info: ServerInfo) -> None:
        """Begin with the weights that the server has. Raises EngineProtocolError for a label that is no version."""
        served, model_path = None, self._paths.to_local(info.model_path)
        if info.weight_version == INITIAL_LABEL:  # else it may hold weights of a directory that it does not report
            served = ServedDirectory(model_path, INITIAL_LABEL, await trio.to_thread.run_sync(read_fingerprint, model_path))
        if self._reference is None:
            found = await trio.to_thread.run_sync(read_reference, model_path)
            self._reference = found if found is None or info.dtype is None else expect_dtype(found, info.dtype)
        self._can_sleep = info.can_sleep
        version = version_of(self._name, info.weight_version, self._requests.initial_version)
        self._transaction = WeightTransaction(self._requests, self._controls, deadlines=self._deadlines, version=version, served=served)

    async def close(self) -> None:
        """Resume and wake up a server that the user left paused or asleep."""
        if self._transaction is not None:
            await self._transaction.close()

    async def load_checkpoint(self, checkpoint_path: Path | str) -> Mapping[str, Any]:
        """Load a directory, after checking it. Raises EngineError; before the server is contacted if it does not fit."""
        self._get_transaction()
        path = Path(checkpoint_path).absolute()
        try:
            layout = await trio.to_thread.run_sync(partial(check_checkpoint, path, self._reference, allow_cast=self._allow_cast))
            version = await trio.to_thread.run_sync(read_weight_version, path)
        except CheckpointError as error:
            raise self._refuse(error) from error
        answer = await self._get_transaction().load_directory(path, version, layout.fingerprint)  # the engine may be closed by then
        self._reference = self._reference or layout
        return answer

    async def load_with(self, load: Callable[[str], Awaitable[None]], weight_version: int) -> Mapping[str, Any]:
        """Update the paused server with `load`, which is given the label; the weights were checked. Raises EngineError."""
        return await self._get_transaction().load_with(load, weight_version)

    def check(self, specs: Sequence[WeightSpec]) -> None:
        """Raise EngineError for weights in memory that are not those of the served model."""
        try:
            check_tensors(specs, self._reference, allow_cast=self._allow_cast)
        except CheckpointError as error:
            raise self._refuse(error) from error

    async def read_version(self) -> int:
        """Return the version that the server reports. Raises EngineError."""
        self._get_transaction()
        return version_of(self._name, await self._controls.read_label(), self._requests.initial_version)

    def describe(self) -> str:
        """Describe the server's weights, as the end of a sentence."""
        return self._get_transaction().describe()

    def distrust(self, reason: str) -> None:
        """Fail requests with this reason until an update succeeds."""
        self._get_transaction().distrust(reason)

    async def sleep(self) -> None:
        """Let the server release the memory of its GPU until wake_up(), once it has answered all requests; new ones wait.

        Raises: EngineError, before it is told, for a server that was not started so that it can.
        """
        transaction = self._get_transaction()
        if not self._can_sleep:
            raise EngineError(
                f"{self._name} cannot release the memory of its GPU, or would lose its weights: start it with --enable-sleep-mode (vLLM), "
                "or with --enable-memory-saver --enable-weights-cpu-backup (SGLang)"
            )
        await transaction.sleep()

    async def wake_up(self) -> None:
        """Undo sleep()."""
        await self._get_transaction().wake_up()

    async def pause(self) -> None:
        """Stop generating until resume(); new requests wait."""
        await self._get_transaction().pause()

    async def resume(self) -> None:
        """Undo pause(), or a pause that another client left."""
        await self._get_transaction().resume()

    def _refuse(self, error: CheckpointError) -> EngineError:
        return EngineError(f"{self._name} was not given new weights: {error}")

    def _get_transaction(self) -> WeightTransaction:
        assert self._transaction is not None, "use the engine inside its `async with` block"
        self._requests.check_not_closed()
        return self._transaction


def begin_weight_versions(target: Path, source: Path | None = None, *, copies: bool = False) -> None:
    """Make a model directory one of weight version 0, for servers to begin with.

    Args:
        target: an existing directory.
        source: model directory whose files are linked there first; None = they are there.
        copies: copy instead of link, for servers that see the files under another path.
    """
    for file in () if source is None else source.iterdir():
        link = target / file.name
        if file.is_file() and file.name != WEIGHT_VERSION_FILE:
            link.unlink(missing_ok=True)
            if copies:
                shutil.copyfile(file, link)
            else:
                link.symlink_to(file.absolute())
    (target / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 0}) + "\n")
