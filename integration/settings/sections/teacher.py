"""The teacher of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from integration.settings.sections.addresses import check_address, is_url, strip_user
from rollouts.config import check_count
from rollouts.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TeacherSection:
    """The teacher of distillation, for algorithms that need one (opd, gkd): a frozen model, a server, or the policy with a context."""

    path: str | None = None  # Hugging Face model directory, or ORG/NAME on the hub; None = the teacher is not a single model of this run
    url: tuple[str, ...] = ()  # running servers that score tokens, http://host:port; several serve the same model
    kind: Literal["vllm", "sglang"] = "vllm"  # kind of the servers of teacher.url and teacher.each
    api_key_variable: str | None = None  # environment variable with the API key of the teacher's servers; None = no key
    tokenizer: str | None = None  # model directory with the servers' tokenizer, to compare it with the policy's; None = not compared
    by: str | None = None  # field of a row of data that names its teacher among teacher.each; None = one teacher for all rows
    # teachers by the value of the field teacher.by: NAME=DIR, or NAME=http://host:port of a server
    each: tuple[str, ...] = ()
    # text that the teacher reads in place of the prompt, with {prompt} and fields of the row in braces, as '{prompt} Answer: {answer}', the
    # reward's {feedback} or the policy's {response}; without another teacher the policy itself, reading it, is the teacher; None = the
    # policy's own prompt
    context: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the weights of models; bfloat16 needs --backend.compute-dtype bfloat16
    # tokens that a model names as the most probable in place of each, for gkd; all others count as one; 0 = the whole vocabulary
    top_k: int = 64

    def __post_init__(self) -> None:
        check_count(self, "top_k")
        given = [f"--teacher.{name}" for name in ("path", "url", "each") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} is given beside {given[1]}: give one of them")
        if bool(self.each) != (self.by is not None):
            what = ("teacher.each", "--teacher.by FIELD") if self.each else ("teacher.by", "--teacher.each NAME=DIR NAME=DIR")
            raise ConfigError(f"{what[0]} is given alone: add {what[1]}")
        for entry in self.each:
            name, separator, place = entry.partition("=")
            if not (name and separator and place):
                raise ConfigError(f"teacher.each has {entry!r}, expected NAME=DIR or NAME=http://host:port")
        if len({entry.partition("=")[0] for entry in self.each}) < len(self.each):
            raise ConfigError(f"teacher.each names a teacher twice: {', '.join(self.each)}")
        if self.path is not None and "://" in self.path:
            raise ConfigError(f"teacher.path is {strip_user(self.path)!r}, which is no directory: give a server by --teacher.url")
        for url in self.url:
            check_address("teacher.url", url, "--teacher.api-key-variable")
        for _, place in self._each:
            if "://" in place:
                check_address("teacher.each", place, "--teacher.api-key-variable")
        if self.context is not None and (self.url or self.servers):
            raise ConfigError("teacher.context is given with servers: a context is for models of this run, --teacher.path or the policy")

    @property
    def models(self) -> dict[str, str]:
        """Directories of models of this run, by the name of the teacher; "" = the only one."""
        return ({} if self.path is None else {"": self.path}) | {name: place for name, place in self._each if not is_url(place)}

    @property
    def servers(self) -> dict[str, str]:
        """Servers of teacher.each, by the name of the teacher."""
        return {name: place for name, place in self._each if is_url(place)}

    @property
    def is_given(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.path or self.url or self.each or self.context)

    @property
    def is_policy(self) -> bool:
        """Whether the teacher is the policy itself with a context."""
        return self.context is not None and not self.models

    @property
    def _each(self) -> list[tuple[str, str]]:
        return [(name, place) for name, _, place in (entry.partition("=") for entry in self.each)]
