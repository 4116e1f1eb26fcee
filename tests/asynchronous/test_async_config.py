"""Settings of asynchronous rollouts: values that are refused, and defaults that are derived."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.algorithms.presets import decoupled, grpo
from rollouts.asynchronous.config import AsyncConfig, check_async_config
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.config_files import from_dict, to_dict
from rollouts.errors import ConfigError


def test_off_and_on_policy_by_one_version_unless_the_user_says_otherwise():
    config = AsyncConfig()
    assert (config.enabled, config.max_staleness, config.segment_wise, config.interrupts) == (False, 1, False, False)


@pytest.mark.parametrize(("max_staleness", "expected"), [(0, 6), (1, 12), (4, 30)])
def test_limits_default_to_what_bounded_staleness_admits(max_staleness: int, expected: int):
    config = AsyncConfig(max_staleness=max_staleness)
    assert (config.concurrent_groups(6), config.queue_groups(6)) == (expected, expected)
    own = replace(config, max_concurrent_rollouts=3, queue_size=7)
    assert (own.concurrent_groups(6), own.queue_groups(6)) == (3, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": -1}, "max_staleness is -1, expected a whole number, at least 0"),
        ({"max_staleness": 1.5}, "max_staleness is 1.5"),
        ({"max_staleness": True}, "max_staleness is True"),
        ({"max_concurrent_rollouts": 0}, "max_concurrent_rollouts is 0, expected a whole number, at least 1"),
        ({"queue_size": 0}, "queue_size is 0"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"max_stale_attempts": 0}, "max_stale_attempts is 0"),
        ({"retry_delay_s": -1.0}, "retry_delay_s is -1.0"),
        ({"retry_delay_s": math.inf}, "retry_delay_s is inf, expected a finite number"),
        ({"retry_delay_s": math.nan}, "retry_delay_s is nan"),
        ({"rollout_timeout_s": 0.0}, "rollout_timeout_s is 0.0, expected a finite number of seconds above 0, or None"),
        ({"rollout_timeout_s": math.inf}, "rollout_timeout_s is inf"),
        ({"patience_s": -3.0}, "patience_s is -3.0"),
        ({"patience_s": math.nan}, "patience_s is nan"),
        ({"patience_s": "3"}, "patience_s is '3', expected a finite number of seconds"),
        ({"enabled": "no"}, "enabled is 'no', expected True or False"),
        ({"enable_segment_wise_ppo": 1}, "enable_segment_wise_ppo is 1, expected True or False"),
        ({"when_queue_full": "block"}, "when_queue_full is 'block': known are raise, wait"),
        ({"order": "finish"}, "did you mean 'finished'"),
        ({"on_stale": "raise"}, "on_stale is 'raise'"),
        ({"on_failure": "retries"}, "did you mean 'retry'"),
        ({"in_flight": "abort"}, "in_flight is 'abort'"),
        ({"checkpoint_in_flight": "continue"}, "checkpoint_in_flight is 'continue': known are interrupt, restart"),
        ({"missed_segment": "prox"}, "did you mean 'proximal'"),
        ({"enable_segment_wise_ppo": True, "in_flight": "continue"}, "in_flight is 'continue', but enable_segment_wise_ppo is True"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        AsyncConfig(**settings)


def test_segment_wise_interrupts_rollouts_at_every_sync():
    assert AsyncConfig(enable_segment_wise_ppo=True).interrupts
    assert AsyncConfig(in_flight="interrupt").interrupts
    assert not AsyncConfig(in_flight="continue").interrupts


def test_settings_go_to_plain_values_and_back():
    config = AsyncConfig(enabled=True, max_staleness=3, rollout_timeout_s=5.0, order="submitted", in_flight="interrupt")
    assert from_dict(AsyncConfig, to_dict(config)) == config


def test_a_queue_that_holds_less_than_a_batch_is_refused():
    with pytest.raises(ConfigError, match="queue_size is 3, but a batch has 4 groups: increase queue_size to at least 4"):
        check_async_config(AsyncConfig(queue_size=3), RolloutConfig(batch_size=4))
    check_async_config(AsyncConfig(queue_size=4), RolloutConfig(batch_size=4))


def test_over_sampling_is_of_the_other_loop():
    with pytest.raises(ConfigError, match=r"over_sampling_factor is 1\.5, but asynchronous rollouts are not generated batch by batch"):
        check_async_config(AsyncConfig(), RolloutConfig(batch_size=4, over_sampling_factor=1.5))


@pytest.mark.parametrize(("switch", "segment_wise"), [(True, False), (False, True), (None, True)])
def test_the_algorithm_and_the_switch_must_agree(switch: bool | None, segment_wise: bool):
    training = RLTrainingConfig(algorithm=decoupled(grpo(), segment_wise=segment_wise))
    with pytest.raises(ConfigError, match=f"enable_segment_wise_ppo is {bool(switch)}, but the algorithm"):
        check_async_config(AsyncConfig(enable_segment_wise_ppo=switch), RolloutConfig(batch_size=4), training)
    agreed = RLTrainingConfig(algorithm=decoupled(grpo(), segment_wise=bool(switch)))
    check_async_config(AsyncConfig(enable_segment_wise_ppo=switch), RolloutConfig(batch_size=4), agreed)


def test_the_page_has_every_setting_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text()
    settings = page[page.index("## Settings") : page.index("## Metrics")]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", settings, re.MULTILINE)
    assert rows == [(field.name, repr(field.default)) for field in fields(AsyncConfig)]
