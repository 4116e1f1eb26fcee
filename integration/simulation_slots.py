"""The slots of inference engines that compute nothing: which response gets which slot, and when each will be done."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Literal

import trio

from rollouts.config import check_not_negative, check_positive, check_setting
from rollouts.types import Sample, Status


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """What the engines can do."""

    engines: int = 8  # inference engines that hold the same weights; prompt i goes to engine i % engines
    slots: int = 64  # sequences that an engine generates at once
    token_rate: float = 50.0  # tokens per second of each sequence, whatever runs beside it
    prefill_rate: float = 20000.0  # tokens per second with which an engine reads prompts and the tokens of sequences that it continues
    prompt_tokens: int = 512
    sync_s: float = 2.0  # in which engines stand still to get new weights
    kv_cache: Literal["recompute", "keep"] = "recompute"  # of running sequences under new weights: read again, or used as it is
    failure_rate: float = 0.0  # fraction of groups whose generation raises, at a random moment
    keep_partial: bool = True  # groups that were interrupted go on from their tokens; otherwise they begin anew

    def __post_init__(self) -> None:
        check_positive(self, "engines", "slots", "prompt_tokens")
        check_not_negative(self, "sync_s", "failure_rate")
        for name in ("token_rate", "prefill_rate"):
            value = getattr(self, name)
            check_setting(0 < value < math.inf, name, value, "a finite number above 0")
        check_setting(self.failure_rate < 1, "failure_rate", self.failure_rate, "less than 1")


@dataclass(eq=False)
class GroupRequest:
    """A group under generation. Times are on the fleet's clock, which stands still while weights are updated."""

    index: int  # of its prompt
    sample: Sample  # what it begins with: nothing, or the tokens of an earlier attempt
    done: list[int]  # tokens that each response begins with
    targets: list[int]  # tokens that each response will have
    fails_after: float  # part of its duration after which it raises; inf = never
    starts: list[float] = field(default_factory=list[float])  # when each response gets (or got) a slot and its prompt is read
    ends: list[float] = field(default_factory=list[float])
    finish: float = math.inf
    is_planned: bool = False
    stopped_at: float | None = None  # when it was finished, aborted or failed
    status: Status = Status.PENDING
    over: trio.Event = field(default_factory=trio.Event)

    def active_seconds(self, now: float) -> float:
        """Seconds of slots that its responses have used up to now."""
        return sum(min(end, now) - start for start, end in zip(self.starts, self.ends, strict=True) if start < now)


class EngineSlots:
    """The slots of one engine, each known by the time from which it is free, and what is in them, in the order of arrival."""

    def __init__(self, section: EngineSection) -> None:
        self._section = section
        self.free_from = [0.0] * section.slots
        self._read_until = 0.0  # when prompts that are known have been read
        self.requests: dict[int, GroupRequest] = {}

    def plan(self, request: GroupRequest, now: float) -> None:
        """Give each response the slot that is free first, once the prompt has been read."""
        missing = [k for k, done in enumerate(request.done) if done < request.targets[k]]
        read = self._section.prompt_tokens + sum(request.done[k] for k in missing)
        self._read_until = max(self._read_until, now, self.free_from[0]) + read / self._section.prefill_rate
        request.starts, request.ends = [now] * len(request.targets), [now] * len(request.targets)
        self._give_slots(request, missing, self._read_until)
        request.is_planned = True

    def remove(self, request: GroupRequest, now: float) -> list[GroupRequest]:
        """Take a request out before its end. Returns those that now come to their end at another time, because they wait less."""
        del self.requests[request.index]
        running = [end for r in self.requests.values() for start, end in zip(r.starts, r.ends, strict=True) if start <= now < end]
        self.free_from = [*running, *[now] * (self._section.slots - len(running))]
        heapq.heapify(self.free_from)
        self._read_until = now
        moved: list[GroupRequest] = []
        for other in self.requests.values():
            before = other.finish
            waiting = [k for k, start in enumerate(other.starts) if start > now]
            if any(start <= now and start < end for start, end in zip(other.starts, other.ends, strict=True)):  # its prompt has been read
                self._give_slots(other, waiting, now)
            elif waiting:
                self.plan(other, now)
            if other.finish != before:
                moved.append(other)
        return moved

    def _give_slots(self, request: GroupRequest, responses: list[int], not_before: float) -> None:
        for k in responses:
            start = max(self.free_from[0], not_before)
            request.starts[k], request.ends[k] = start, start + (request.targets[k] - request.done[k]) / self._section.token_rate
            heapq.heapreplace(self.free_from, request.ends[k])
        self._finish_by_plan(request)

    def _finish_by_plan(self, request: GroupRequest) -> None:
        first, last = min(request.starts), max(request.ends)
        request.finish = last if request.fails_after == math.inf else first + request.fails_after * (last - first)

    def clear(self, now: float) -> None:
        """Free all slots."""
        self.free_from = [now] * self._section.slots
        self._read_until = now
        self.requests.clear()
