"""Blocking shells round the parts that await: engines by name, their batches and conversations, and PPOTrainer.

    trainer = PPOTrainer(config, reward_fn=lambda t: sum(t.rewards), environment=Guess)
    trainer.fit(num_epochs=2, num_iters_per_epoch=10)
    trainer.metrics_history[-1]["policy_loss"]
    trainer.cleanup()

Each holds one thread with a trio loop until it is closed. Inside a trio loop of your own use what they are made of: open_text_engine,
open_trainer, engines.BatchInferenceManager and agents.conversation.MultiTurnInferenceEngine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rollouts.agents.conversation import Conversation
from rollouts.agents.conversation import MultiTurnInferenceEngine as Conversations
from rollouts.agents.episode import Episode
from rollouts.chat.tokenize import Messages
from rollouts.engines.text.batch import GeneratedTexts
from rollouts.trainer.config import ConfigStore, InferenceConfig
from rollouts.trainer.engines import TextEngine, open_text_engine
from rollouts.trainer.environments import create_environment_factory
from rollouts.trainer.loop_thread import LoopThread
from rollouts.trainer.session import Dataset, TrainerSession, TrainingTask, open_trainer
from rollouts.training.metrics import MetricsLogger
from rollouts.types import Message, Prompt, RolloutBatch, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BlockingEngine(AbstractContextManager["BlockingEngine"]):
    """Engine whose calls wait for their answers. Made by create_inference_engine; close() stops what was launched for it."""

    def __init__(self, thread: LoopThread[TextEngine]) -> None:
        """Args: thread: holds the engine open; close() closes it."""
        self._thread = thread

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model."""
        return self._thread.value.tokenizer

    @property
    def config(self) -> InferenceConfig:
        """Settings of sampling."""
        return self._thread.value.config

    @property
    def thread(self) -> LoopThread[TextEngine]:
        """The thread with the engine, for other shells round it."""
        return self._thread

    def generate(
        self,
        prompts: Sequence[str | Messages],
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> GeneratedTexts:
        """Generate one answer to each prompt, in their order; see TextEngine.generate.

        Returns: texts.sequences (list of str), texts.tokens ([prompts, longest answer], padded), texts.lengths.
        """
        return self._thread.call("generate()", self._thread.value.generate, prompts, max_tokens, temperature, top_p, seed)

    def close(self) -> None:
        """Close the engine, stop its server if one was launched, and end the thread."""
        self._thread.close()


def create_inference_engine(
    model_path: str | Path | None = None,
    backend: str | None = None,
    config: ConfigStore | InferenceConfig | None = None,
    **options: Any,
) -> BlockingEngine:
    """Create an engine by name: engine = create_inference_engine("path/to/model", "local"); engine.generate(prompts=["1+1="]).

    Close it, or use it in a `with` block. Arguments and errors are those of open_text_engine; inside a trio loop use that.
    """
    opened = open_text_engine(model_path, backend, config, **options)
    return BlockingEngine(LoopThread(opened, "create_inference_engine", "async with open_text_engine(...) as engine: await ..."))


class BatchInferenceManager:
    """Answers to any number of prompts with a bound on the requests in flight: rollouts.BatchInferenceManager for a blocking engine."""

    def __init__(self, engine: BlockingEngine, batch_size: int = 64) -> None:
        """Args: batch_size: most requests in flight. Raises ConfigError unless it is at least 1."""
        self._thread = engine.thread
        self._manager = self._thread.value.batch_manager(batch_size)

    def generate_batch(
        self,
        prompts: Sequence[str | Messages],
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> GeneratedTexts:
        """Generate one answer to each prompt, in their order; failed prompts are in `errors` of the result and affect no other.

        Args: max_tokens, temperature, top_p: None = those of the engine's config. seed: of the first prompt, the others count on.
        """
        generate = partial(self._manager.generate_batch, temperature=temperature, top_p=top_p, seed=seed)
        return self._thread.call("generate_batch()", generate, prompts, max_tokens)


class MultiTurnInferenceEngine:
    """Conversations with a blocking engine, token in and token out: agents.conversation.MultiTurnInferenceEngine."""

    def __init__(self, engine: BlockingEngine, max_turns: int | None = None, system_prompt: str | None = None) -> None:
        """
        Args:
            max_turns: most answers in a conversation or an episode; None = InferenceConfig.max_turns, or 8.
            system_prompt: system message of each conversation; None = that of InferenceConfig.
        """
        self._thread = engine.thread
        parts = self._thread.value
        turns = (parts.config.max_turns or 8) if max_turns is None else max_turns
        prompt = parts.config.system_prompt if system_prompt is None else system_prompt
        self._chat = Conversations(parts.engine, parts.tokenizer, turns, prompt, params=parts.params)

    def start_conversation(self, messages: str | Messages, seed: int = 0) -> Conversation:
        """Return a conversation before the model's first answer; a text is a user's message. Raises DataError."""
        return self._chat.start_conversation(messages, seed=seed)

    def step(self, conversation: Conversation, messages: str | Messages | None = None) -> Conversation:
        """Return the conversation with the model's next answer, to further messages or to those that are there. Raises GenerationError."""
        return self._thread.call("step()", self._chat.step, conversation, messages)

    def run_episode(self, environment: Any, prompt: Prompt | None = None, seed: int = 0) -> Episode:
        """Play an episode in an environment: a class, a function that makes one, or an object, of which the episode gets a copy."""
        play = partial(self._chat.run_episode, create_environment_factory(environment), prompt, seed=seed)
        return self._thread.call("run_episode()", play)

    def format_conversation(self, conversation: Conversation | Sequence[Message]) -> str:
        """Return a conversation for people: each message begins a line with its role."""
        return self._chat.format_conversation(conversation)


class PPOTrainer(AbstractContextManager["PPOTrainer"]):
    """Training by a ConfigStore, step by step or as a whole; every method waits for its end. TrainerSession says what each does."""

    def __init__(
        self,
        config: ConfigStore | None = None,
        reward_fn: Callable[..., Any] | None = None,
        environment: Any = None,
        dataset: Dataset | None = None,
        *,
        sample_reward_fn: Callable[[Sample], Any] | None = None,
        task: TrainingTask | None = None,
        metrics_logger: MetricsLogger | None = None,
    ) -> None:
        """Load the models and open the engine.

        Args:
            config: settings; None = ConfigStore().
            reward_fn: f(trajectory) or f(trajectory, environment) -> reward, such as lambda t: sum(t.rewards); None = the environment's.
            environment: class, function that makes one, or object, of which each episode gets a copy; None = single answers.
            dataset: JSONL file or folder of prompts, or a list of them; None = the environment makes its tasks from seeds.
            sample_reward_fn: f(Sample) -> reward, in place of reward_fn: any reward of rollouts.rewards.
            task: all of these as a value, with more; None = made of the others.
            metrics_logger: gets the line of each iteration, too.

        Raises: ConfigError for settings that do not fit together; BlockingCallError inside a trio loop: use open_trainer there.
        """
        if task is None:
            task = TrainingTask(reward_fn=reward_fn, environment=environment, dataset=dataset, sample_reward_fn=sample_reward_fn)
        opened = open_trainer(config, task, metrics_logger=metrics_logger)
        instead = "async with open_trainer(...) as trainer: await trainer.fit(...)"
        self._thread: LoopThread[TrainerSession] = LoopThread(opened, "PPOTrainer", instead)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.cleanup()

    @property
    def metrics_history(self) -> list[dict[str, float]]:
        """Metrics of the last 1,000 iterations; see TrainerSession.metrics_history."""
        return self._thread.value.metrics_history

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the policy so far."""
        return self._thread.value.num_updates

    def fit(self, num_epochs: int | None = None, num_iters_per_epoch: int | None = None) -> list[dict[str, float]]:
        """Train for num_epochs * num_iters_per_epoch iterations; return metrics_history. See TrainerSession.fit."""
        return self._thread.call("fit()", self._thread.value.fit, num_epochs, num_iters_per_epoch)

    def rollout(self) -> RolloutBatch:
        """Generate and score the next rollout batch."""
        return self._thread.call("rollout()", self._thread.value.rollout)

    def train_step(self, rollouts: RolloutBatch | None = None) -> dict[str, float]:
        """Train on one rollout batch, None = the next one, and hand the new weights to the engine. Returns the metrics."""
        return self._thread.call("train_step()", self._thread.value.train_step, rollouts)

    def generate(
        self,
        prompts: Sequence[str | Messages],
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> GeneratedTexts:
        """Generate one answer to each prompt with the present weights; see TextEngine.generate."""
        return self._thread.call("generate()", self._thread.value.generate, prompts, max_tokens, temperature, top_p, seed)

    def save_checkpoint(self, path: str | Path | None = None) -> Path:
        """Write path/step_NNNN and return it; None = CheckpointConfig.output_dir. See TrainerSession.save_checkpoint."""
        return self._thread.call("save_checkpoint()", self._thread.value.save_checkpoint, path)

    def load_checkpoint(self, path: str | Path) -> int:
        """Restore a checkpoint, or the newest one in a directory; return its number of iterations. See TrainerSession.load_checkpoint."""
        return self._thread.call("load_checkpoint()", self._thread.value.load_checkpoint, path)

    def cleanup(self) -> None:
        """Free the models, close the engine, stop its server if one was launched, and end the thread; nothing a second time."""
        self._thread.close()
        gc.collect()
