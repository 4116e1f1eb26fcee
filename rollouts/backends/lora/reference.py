"""Reference model of a KL term for a policy that trains adapters: the policy's own model without them, so there is no second copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from rollouts.backends.protocol import (
    BackendFeature,
    Future,
    OutputFn,
    TrainingBackend,
    TrainsAdapters,
    find_outputs,
    find_token_spec,
    get_backend_features,
    require_backend_feature,
)
from rollouts.errors import BackendError
from rollouts.models.tokens import TokenSpec
from rollouts.types import LossFn, TrainBatch


class LoRAReference:
    """TrainingBackend that computes with the frozen weights of a policy and trains nothing. Made by create_lora_reference."""

    def __init__(self, policy: TrainsAdapters) -> None:
        self._policy = policy

    @property
    def features(self) -> frozenset[BackendFeature]:
        """Features of the policy that describe its model."""
        return get_backend_features(self._policy) & {BackendFeature.OUTPUTS, BackendFeature.TOKENS}

    @property
    def token_spec(self) -> TokenSpec | None:
        """Vocabulary of the model; None = not known."""
        return find_token_spec(self._policy)

    @property
    def computes(self) -> frozenset[str] | None:
        """Fields of TokenOutputs that this backend fills; None = not known."""
        return find_outputs(self._policy)

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """Submit a forward pass as a job of the policy, in order of submission; see TrainingBackend."""
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
    """Create the reference= of run_rl_training for a policy that trains adapters: its frozen weights, without a copy.

    Its passes are jobs of the policy, so pass the same pipeline that trains the policy; it needs no pipeline of its own. It computes with
    the model that the backend was made from: for an SFT checkpoint, the merged SFT model. After load_weights on the policy it computes
    with the loaded weights.

    Args:
        policy: a backend made with lora=, or its pipeline.

    Raises: ConfigError if it trains all of its weights.
    """
    advice = (
        "It trains all weights of its model, so the model that it began as is not there any more: make the backend with "
        "lora=LoRAConfig(...), or a reference of its own with create_reference_backend"
    )
    return LoRAReference(require_backend_feature(policy, BackendFeature.ADAPTERS, "create_lora_reference", instead=advice))
