"""Recording of the experts that a decoding model chooses, for their replay in training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from rollouts.models.routers import Routers, record_choices
from rollouts.types import RoutedExperts

T = TypeVar("T")


@dataclass(eq=False)
class ExpertRecorder:
    """Records the experts of a model's passes; without routers it records nothing."""

    routers: Routers = field(default_factory=Routers)

    def run(self, run: Callable[[], T]) -> tuple[T, Tensor | None]:
        """Run a pass. Returns its result, and the experts of its tokens # [N, routers, k] int16 on their device."""
        if not self.routers.modules:
            return run(), None
        chosen: list[Tensor] = []
        with self._record(chosen):
            result = run()
        return result, torch.stack(chosen, 1)

    @contextmanager
    def _record(self, chosen: list[Tensor]) -> Generator[None]:
        def note(_place: int, _logits: Tensor, experts: Tensor) -> None:
            chosen.append(experts.to(torch.int16))

        with record_choices(self.routers, note):  # routers are called in their order, each once
            yield

    def to_value(self, rows: Sequence[bytes], num_tokens: int) -> RoutedExperts | None:
        """Return the record of a request's rows, see read_rows; None if nothing was recorded."""
        if not self.routers.modules:
            return None
        record = RoutedExperts(data=b"".join(rows), num_routers=len(self.routers.modules), top_k=self.routers.top_k)
        return record.take(num_tokens)


def read_rows(experts: Tensor | None) -> list[bytes]:
    """Return the experts of each token # [N, routers, k] as bytes; none for None."""
    return [] if experts is None else [row.tobytes() for row in experts.cpu().numpy()]
