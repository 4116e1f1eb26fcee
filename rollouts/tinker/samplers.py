"""Engines for sampling: one for each set of weights that clients sample from, as many as are kept."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import trio
from torch import Tensor

from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import EngineRequestError
from rollouts.models.weights import check_weights_fit, copy_weights, read_weights
from rollouts.tinker.trained import share_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sampler:
    """A client's place to sample from."""

    sampler_id: str
    session_id: str
    model_path: str | None  # as clients name it; None = the base model, or weights without a name
    source: str  # key of its weights: samplers of the same weights share an engine


@dataclass(eq=False)
class _Loaded:
    engine: InProcessEngine
    num_requests: int = 0  # in flight


BASE = "base"
"""Source of the base model."""


class Engines:
    """Engines by the source of their weights. Beyond `most`, the one used longest ago that has no request makes room."""

    def __init__(self, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, most: int, seed: int) -> None:
        self._base, self._tokenizer, self._most, self._seed = base, tokenizer, most, seed
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self._paths: dict[str, Path] = {}  # sources whose weights are on the disk
        self._loading = trio.Lock()

    def name_path(self, path: str, directory: Path) -> str:
        """Note where weights are; return their source, which is another one when they are overwritten."""
        source = f"{path} {_find_stamp(directory)}"
        self._paths[source] = directory
        return source

    async def add(self, source: str, weights: Mapping[str, Tensor]) -> None:
        """Add an engine with copies of these weights, which are kept nowhere else."""
        async with self._loading:
            await self._load(source, weights)

    @asynccontextmanager
    async def use(self, source: str) -> AsyncGenerator[InProcessEngine]:
        """Use the engine of a source, loaded if need be.

        Raises: EngineRequestError if its weights made room for others and are on no disk, or were overwritten there; CheckpointError
            if they cannot be read.
        """
        found = self._loaded.get(source)
        if found is None:  # engines that are there do not wait for one that is loaded
            async with self._loading:
                found = await self._find(source)
                found.num_requests += 1
        else:
            found.num_requests += 1
        self._loaded.move_to_end(source)
        try:
            yield found.engine
        finally:
            found.num_requests -= 1

    async def forget(self, source: str) -> None:
        """Close the engine of a source that nobody will ask for again."""
        found = self._loaded.pop(source, None)
        if found is not None:
            await found.engine.__aexit__(None, None, None)

    async def _find(self, source: str) -> _Loaded:
        found = self._loaded.get(source)
        if found is not None:
            return found
        if source not in self._paths and source != BASE:
            raise EngineRequestError(
                f"the weights of this sampling client are no longer kept: this server keeps {self._most} sets of weights (its setting "
                "max_samplers), and newer ones took their place. Take a new sampling client, or save the weights under a name: "
                "save_weights_for_sampler"
            )
        return await self._load(source, None)

    async def _load(self, source: str, weights: Mapping[str, Tensor] | None) -> _Loaded:
        while len(self._loaded) >= self._most:
            idle = next((name for name, loaded in self._loaded.items() if not loaded.num_requests), None)
            if idle is None:
                break
            await self.forget(idle)
        engine = await trio.to_thread.run_sync(self._create, source, weights)
        self._loaded[source] = _Loaded(engine)
        return self._loaded[source]

    def _create(self, source: str, weights: Mapping[str, Tensor] | None) -> InProcessEngine:
        if source == BASE:
            model = share_weights(self._base)
        else:
            model = copy.deepcopy(self._base)
            if weights is None:
                directory = self._paths[source]
                path, _, stamp = source.rpartition(" ")
                weights = read_weights(directory, model)
                check_weights_fit(cast("Any", model), weights, str(directory))
                if _find_stamp(directory) != stamp:  # looked at behind reading, in the midst of which it may have changed
                    raise EngineRequestError(f"{path} was overwritten after this sampling client was made: take a new one")
            copy_weights(cast("Any", model), weights)
        return InProcessEngine(cast("Any", model).eval(), self._tokenizer, seed=self._seed, name="the server's engine")


def _find_stamp(directory: Path) -> str:
    """Return what tells a directory from one that has replaced it."""
    found = directory.stat()
    return f"{found.st_ino}-{found.st_mtime_ns}"
