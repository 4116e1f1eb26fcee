"""The frozen model of a KL term where the policy trains adapters: the policy's own model without them, so that there is no second copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from rollouts.backends.protocol import DescribesOutputs, Future, OutputFn, TrainingBackend, TrainsAdapters
from rollouts.backends.token_spec import DescribesTokens, TokenSpec
from rollouts.errors import BackendError, ConfigError
from rollouts.types import LossFn, TrainBatch


class LoRAReference:
    """A TrainingBackend that computes with the frozen weights of a policy, and trains nothing. Made by create_lora_reference."""

    def __init__(self, policy: TrainsAdapters) -> None:
        self._policy = policy

    @property
    def token_spec(self) -> TokenSpec | None:
        """See DescribesTokens."""
        return self._policy.token_spec if isinstance(self._policy, DescribesTokens) else None

    @property
    def computes(self) -> frozenset[str] | None:
        """See DescribesOutputs."""
        return self._policy.computes if isinstance(self._policy, DescribesOutputs) else None

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """See TrainingBackend; one of the policy's jobs, in the order of their submission."""
        return self._policy.forward_base(batch, output_fn, with_entropy=with_entropy)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> NoReturn:
        """Raises BackendError."""
        self._refuse("forward_backward")

    def optim_step(self) -> NoReturn:
        """Raises BackendError."""
        self._refuse("optim_step")

    def get_weights(self) -> NoReturn:
        """Raises BackendError."""
        self._refuse("get_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> NoReturn:
        """Raises BackendError."""
        self._refuse("load_weights")

    def _refuse(self, operation: str) -> NoReturn:
        raise BackendError(
            f"{operation} was called on the reference of a policy with adapters, which is the policy's own model: it only computes; train "
            "the policy, or make a reference of its own with create_reference_backend"
        )


def create_lora_reference(policy: TrainingBackend) -> LoRAReference:
    """The reference= of run_rl_training for a policy that trains adapters: its frozen weights, without a copy.

    Its passes are jobs of the policy, so hand over the very pipeline that the policy is trained through; it needs no pipeline of its own.
    What it computes is the model that the backend was made from: of one that was made from an SFT checkpoint the merged SFT model. After
    load_weights on the policy it is what was loaded.

    Args:
        policy: a backend made with lora=, or its pipeline.

    Raises: ConfigError if it trains all of its weights.
    """
    if not (isinstance(policy, TrainsAdapters) and policy.trains_adapters):
        raise ConfigError(
            f"{type(policy).__name__} trains all weights of its model, so the model that it began as is not there any more: make the "
            "backend with lora=LoRAConfig(...), or a reference of its own with create_reference_backend"
        )
    return LoRAReference(policy)
