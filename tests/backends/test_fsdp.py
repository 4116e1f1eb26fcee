"""A model sharded over processes gives the numbers of one process. The program of several ranks is fsdp_ranks.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_processes import check_records, start_ranks

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.protocol import BackendFeature, get_backend_features
from rollouts.backends.ranks.distributed import init_distributed
from rollouts.backends.ranks.rows import combine_metrics, combine_recorded, combine_rows, plan_rank_rows
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import BadNumbers
from rollouts.data.collate import collate_samples
from rollouts.errors import BackendError, ConfigError
from rollouts.testing import create_tiny_model
from rollouts.types import Sample

pytestmark = pytest.mark.timeout(300)  # two processes, on a machine that has other things to do

CODE = """
sys.path.insert(0, {tests!r})
from pathlib import Path
import fsdp_ranks
fsdp_ranks.main(Path(sys.argv[1]), {num_steps}, {names!r}, all_checks={all_checks})
"""


def run_ranks(folder: Path, num_steps: int, names: Sequence[str], *, all_checks: bool):
    code = CODE.format(tests=str(Path(__file__).parents[1] / "support"), num_steps=num_steps, names=names, all_checks=all_checks)
    children = start_ranks(code, 2, folder, folder=folder / "output")
    try:
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
    finally:
        for child in children:
            child.kill()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the findings of each of two ranks."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), 3, ("grpo", "decoupled ppo"), all_checks=True)


def check_algorithm(found, name: str, num_steps: int) -> None:
    zero, one = (rank["algorithms"][name] for rank in found)
    assert len(zero["ranks"]) == len(zero["single"]) == num_steps
    assert zero["ranks"] == one["ranks"], "ranks do not agree"
    for found_step, expected in zip(zero["ranks"], zero["single"], strict=True):
        assert found_step == pytest.approx(expected, abs=1e-5)
    assert zero["weights"] < 1e-5
    assert max(step["grad_norm"] for step in zero["single"]) > 0.3, "nothing was clipped"


@pytest.mark.parametrize("name", ["sft", "grpo", "decoupled ppo"])
def test_two_ranks_train_as_one_process_does(found, name: str):
    check_algorithm(found, name, 3)


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does_over_twenty_steps(tmp_path: Path):
    found = run_ranks(tmp_path, 20, ("grpo", "ppo", "decoupled ppo"), all_checks=False)
    for name in ("sft", "grpo", "ppo", "decoupled ppo"):
        check_algorithm(found, name, 20)


def test_two_ranks_train_a_reward_model_as_one_process_does(found):
    zero, one = (rank["pairs"] for rank in found)
    assert zero["ranks"] == one["ranks"]
    for found_step, expected in zip(zero["ranks"], zero["single"], strict=True):
        assert found_step == pytest.approx(expected, abs=1e-5)


def test_teachers_of_two_ranks_name_tokens_and_students_learn_from_them_as_in_one_process(found):
    """The teacher has 40 embeddings, the policy 32: the teacher's 5 most probable tokens are among these."""
    zero, one = (rank["distillation"] for rank in found)
    assert zero["ranks"] == one["ranks"], "ranks do not agree"
    for step in range(2):
        for column, expected in zip(zero["ranks"]["columns"][step], zero["single"]["columns"][step], strict=True):
            torch.testing.assert_close(torch.tensor(column), torch.tensor(expected), atol=1e-5, rtol=0)
        log_probs, tops, ids = (torch.tensor(column) for column in zero["ranks"]["columns"][step])
        named = log_probs < 0
        assert tops.shape[-1] == 6 and ids.shape[-1] == 5 and int(ids.max()) < 32
        assert named.sum() > 10 and bool((ids[named].sort(-1).values.diff(dim=-1) > 0).all()), "five tokens in each place"
        torch.testing.assert_close(tops[named].exp().sum(-1), torch.ones(int(named.sum())), atol=1e-5, rtol=0)
        metrics, expected = zero["ranks"]["metrics"][step], zero["single"]["metrics"][step]
        assert metrics == pytest.approx(expected, abs=1e-5) and metrics["teacher_divergence"] > 1e-4
    assert zero["weights"] < 1e-5


def test_what_updates_saw_of_the_tokens_of_all_ranks_is_what_one_process_sees(found):
    zero, one = (rank["records"] for rank in found)
    assert zero["ranks"] == one["ranks"], "ranks do not agree"
    check_records(zero["ranks"], zero["single"])
    assert zero["ranks"]["left"] == one["ranks"]["left"] == 0


def test_records_of_all_ranks_come_in_the_order_of_the_calls():
    one, two, three = (torch.full((1, 2), float(n)) for n in range(3))
    ranks = [[(0, (4,), {"ratio": one}), (2, (5,), {"ratio": two})], [(1, (4,), {"ratio": three})], []]
    found = combine_recorded(ranks)
    assert [(record.call, record.numbers) for record in found] == [(0, (4,)), (1, (4,)), (2, (5,))]
    assert torch.equal(found[1].columns["ratio"], three)


EXACT = ("shard_grad_op", "no_shard", "two copies", "one copy", "checkpointing", "layers together, checkpointing")


def test_how_a_model_is_sharded_does_not_change_what_is_computed(found):
    configs = found[0]["configs"]
    for name in EXACT:
        assert configs[name]["gradients"] == pytest.approx(configs["full_shard"]["gradients"], abs=1e-5), name
        assert configs[name]["weights"] == pytest.approx(configs["full_shard"]["weights"], abs=1e-5), name
        assert configs[name]["step"] == pytest.approx(configs["full_shard"]["step"], abs=1e-5), name


def test_every_setting_does_what_it_says(found):
    for configs in (rank["configs"] for rank in found):
        plain = configs["full_shard"]
        assert plain["layers"][0] == plain["layers"][1], "layers are whole at the moment of the loss"
        assert plain["rest"][0] == 0, "the root is needed again at once"
        assert plain["units"] == 3  # two layers and the root
        assert 0.45 < plain["held"] < 0.55
        assert configs["shard_grad_op"]["layers"][0] == 0
        assert 0.45 < configs["shard_grad_op"]["held"] < 0.55
        assert configs["no_shard"]["held"] == configs["two copies"]["held"] == 1.0
        assert 0.45 < configs["one copy"]["held"] < 0.55
        assert plain["layer_runs"] == 1
        assert configs["checkpointing"]["layer_runs"] == configs["layers together, checkpointing"]["layer_runs"] == 2
        assert configs["layers together, checkpointing"]["layers"] == plain["layers"]
        assert configs["clip_grad"]["step"]["grad_norm"] == pytest.approx(plain["step"]["grad_norm"])
        assert configs["clip_grad"]["weights"] != plain["weights"]


def test_bfloat16_keeps_masters_and_gradients_in_float32_and_results_close(found):
    for configs in (rank["configs"] for rank in found):
        half, plain = configs["bfloat16"], configs["full_shard"]
        assert half["master_dtypes"] == half["gradient_dtypes"] == ["torch.float32"]
        assert half["gradients"] != plain["gradients"], "nothing was computed in bfloat16"
        assert half["gradients"] == pytest.approx(plain["gradients"], rel=5e-2, abs=1e-3)
        assert half["step"] == pytest.approx(plain["step"], rel=2e-2)


def test_each_rank_holds_about_half_of_parameters_and_optimizer_state(found):
    for state in (rank["state"] for rank in found):
        assert state["parameters_are_sharded"]
        assert 0.45 < state["state_held"] < 0.55


def test_a_reference_is_sharded_and_has_neither_gradients_nor_state(found):
    states = [rank["state"] for rank in found]
    assert sum(state["reference_held"] for state in states) == states[0]["reference_size"]
    for state in states:
        assert 0.45 < state["reference_held"] / state["reference_size"] < 0.55
        assert not state["reference_trains"]
        assert state["reference_state"] == 0


def test_a_gradient_that_is_not_finite_on_one_rank_is_left_out_on_all(found):
    for state in (rank["state"] for rank in found):
        assert state["skipped"] == 1.0
        assert state["counts"] == [2, 1]
        assert state["same_weights"]


@pytest.mark.parametrize("case", ["gradient skip", "loss skip"])
def test_a_number_that_is_bad_on_one_rank_leaves_the_update_out_on_all_and_counts_once(found, case: str):
    zero, one = (rank["bad"][case] for rank in found)
    assert zero == one
    kind = case.partition(" ")[0]
    assert (zero["metrics"]["update_skipped"], zero["metrics"][f"num_bad_{kind}"]) == ("1.0", "1.0")
    assert zero["counts"] == [1, 1]
    assert zero["same weights"]


@pytest.mark.parametrize("case", ["gradient stop", "loss stop", "log_prob stop"])
def test_a_number_that_is_bad_on_one_rank_ends_the_run_on_all_with_the_same_error(found, case: str):
    zero, one = (rank["bad"][case] for rank in found)
    assert zero == one
    assert zero["error"][0] == "BadNumberError"
    assert f"the policy for {case.partition(' ')[0]} is to stop" in zero["error"][1]
    assert zero["counts"][0] == 0
    assert zero.get("same weights", True)


def test_a_parameter_that_is_bad_on_one_rank_is_told_by_all(found):
    zero, one = (rank["bad"]["parameter "] for rank in found)
    assert zero == one
    assert "NaN or infinite" in zero["error"][1]


def test_a_row_with_a_bad_log_prob_is_dropped_on_all_ranks_and_counts_once(found):
    for action, updates in (("drop", 1), ("skip", 0)):
        zero, one = (rank["bad"][f"log_prob {action}"] for rank in found)
        assert zero == one
        assert zero["metrics"]["num_bad_log_prob"] == "1.0"
        assert zero["counts"] == [updates, 0]


def test_whole_weights_are_given_and_taken_on_every_rank(found):
    for state in (rank["state"] for rank in found):
        assert state["loaded"]
        assert state["gathered"]


def test_a_pass_that_another_rank_does_not_come_to_is_an_error_that_names_it(found):
    for message, operation in zip(found[0]["late"], ("forward", "forward_backward"), strict=True):
        assert f"{operation} on rank 0 of 2 was not finished within 1 s" in message


# -- one rank, in this process


def make_ragged(seed: int = 0, rows: int = 3):
    samples = [
        Sample(tokens=tuple((seed + 7 * i + t) % 29 + 3 for t in range(3 + i)), loss_mask=(0.0, *(1.0,) * (2 + i))) for i in range(rows)
    ]
    batch = collate_samples(samples)
    return replace(batch, loss_weights=token_mean(batch))


def log_probs(outputs):
    return outputs.log_probs


def test_an_update_is_seen_by_the_next_pass_whatever_pass_was_before_it():
    backends = create_pytorch_backend(create_tiny_model(), lr=1e-2), create_fsdp_backend(create_tiny_model(), lr=1e-2)
    for step in range(2):
        found = []
        for backend in backends:
            backend.forward_backward(make_ragged(step), sft_loss)
            backend.forward(make_ragged(step), log_probs)  # gathers the weights of before the update
            backend.optim_step()
            found.append(backend.forward_backward(make_ragged(step), sft_loss).value["loss"])
            backend.optim_step()
        assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_a_failed_loss_leaves_the_backend_usable():
    backend = create_fsdp_backend(create_tiny_model(), lr=1e-2)

    def bad_loss(outputs, batch):
        raise ZeroDivisionError

    expected = backend.forward(make_ragged(), log_probs).value
    with pytest.raises(ZeroDivisionError):
        backend.forward_backward(make_ragged(), bad_loss)
    backend.load_weights(backend.get_weights().value)
    assert torch.equal(backend.forward(make_ragged(), log_probs).value, expected)


@pytest.mark.parametrize("create", [create_fsdp_backend, create_pytorch_backend])
def test_a_gradient_is_there_although_a_metric_is_no_number(create):
    backend = create(create_tiny_model(), lr=1e-2)

    def loss_with_a_bad_metric(outputs, batch):
        loss, metrics = sft_loss(outputs, batch)
        return loss, {**metrics, "pair": torch.ones(2)}

    with pytest.raises(ValueError, match="only one element tensors"):
        backend.forward_backward(make_ragged(), loss_with_a_bad_metric)
    assert backend.optim_step().value["grad_norm"] > 0


def test_a_directory_gives_the_backend_that_its_model_gives(tmp_path: Path):
    create_tiny_model(seed=5).save_pretrained(tmp_path)
    create_char_tokenizer().save_pretrained(tmp_path)
    backend = create_fsdp_backend(tmp_path, lr=1e-2)
    expected = create_pytorch_backend(tmp_path, lr=1e-2)
    assert backend.token_spec == expected.token_spec
    assert backend.computes == expected.computes
    assert get_backend_features(backend) == set(BackendFeature) - {
        BackendFeature.ADAPTERS,
        BackendFeature.WEIGHT_VIEWS,
        BackendFeature.REDUNDANCY,
    }
    assert backend.num_shards == 1
    assert torch.equal(backend.forward(make_ragged(), log_probs).value, expected.forward(make_ragged(), log_probs).value)


def test_a_checkpoint_that_is_written_beside_training_is_that_of_its_moment(tmp_path: Path):
    backend = create_fsdp_backend(create_tiny_model(), lr=1e-2, tokenizer=create_char_tokenizer(), save_in_background=True)
    backend.forward_backward(make_ragged(), sft_loss)
    backend.optim_step()
    expected = backend.get_weights().value
    for name in ("first", "second"):  # the second waits for the first
        (tmp_path / name).mkdir()
        backend.save_checkpoint(tmp_path / name)
    backend.forward_backward(make_ragged(), sft_loss)
    backend.optim_step()
    backend.close()
    for name in ("first", "second"):
        other = create_fsdp_backend(create_tiny_model(seed=1), lr=1e-2)
        other.load_checkpoint(tmp_path / name)
        assert other.counts.num_updates == 1
        assert all(torch.equal(value, expected[key]) for key, value in other.get_weights().value.items())


def test_too_many_skipped_updates_are_an_error():
    backend = FSDPTrainingBackend(create_tiny_model(), partial(create_adamw_optimizer, lr=1e-2), bad_numbers=BadNumbers(max_skipped=1))
    batch = make_ragged()
    backend.forward_backward(replace(batch, loss_weights=batch.loss_weights * float("inf")), sft_loss)
    with pytest.raises(BackendError, match="not finite"):
        backend.optim_step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharding_strategy": "zero3"}, "known are full_shard, shard_grad_op"),
        ({"mixed_precision": "float16"}, "float32.* or bfloat16"),
        ({"auto_wrap_min_params": -1}, "at least 0"),
        ({"clip_grad": 0.0}, "more than 0"),
        ({"clip_grad": float("nan")}, "more than 0"),
        ({"sharding_strategy": "hybrid_shard"}, "needs ranks_per_replica"),
        ({"ranks_per_replica": 2}, "only hybrid_shard reads"),
    ],
)
def test_settings_out_of_range_are_refused_with_a_reason(settings, message: str):
    with pytest.raises(ConfigError, match=message):
        FSDPConfig(**settings)


def test_what_these_ranks_or_this_device_cannot_do_is_refused():
    create = partial(FSDPTrainingBackend, create_optimizer=partial(create_adamw_optimizer, lr=1e-2))
    with pytest.raises(ConfigError, match="a divisor of the 1 ranks"):
        create(create_tiny_model(), config=FSDPConfig(sharding_strategy="hybrid_shard", ranks_per_replica=2))
    with pytest.raises(ConfigError, match="device is cpu"):
        create(create_tiny_model(), config=FSDPConfig(cpu_offload=True))
    model = create_tiny_model()
    model._no_split_modules = ["NoSuchLayer"]
    with pytest.raises(ConfigError, match="no decoder layers"):
        create(model)


# -- rows of ranks, and what they become


def test_rows_are_dealt_by_tokens_and_units_stay_whole():
    assert plan_rank_rows([9, 4, 5], 2) == [[0], [1, 2]]
    assert plan_rank_rows([3], 2) == [[0], []]
    assert plan_rank_rows([1, 9, 2, 2, 3, 3], 2, rows_per_unit=2) == [[0, 1], [2, 3, 4, 5]]
    assert plan_rank_rows([1, 1, 1], 2, rows_per_unit=2) == [[0, 1], [2]]


def test_parts_of_ranks_come_to_their_places():
    parts = [torch.tensor([[1.0, 2.0], [3.0, 0.0]]), None, torch.tensor([[4.0, 5.0, 6.0]])]
    found = combine_rows(parts, [[0, 2], [], [1]], (3, 4))
    assert found.tolist() == [[1, 2, 0, 0], [4, 5, 6, 0], [3, 0, 0, 0]]


def test_metrics_of_ranks_are_weighted_by_tokens_and_a_rank_without_rows_says_nothing():
    parts = [{"loss": 1.0, "num_tokens": 3.0, "x": 2.0, "max_x": 5.0}, {"loss": 0.5, "num_tokens": 1.0, "x": 6.0, "max_x": 7.0}]
    parts.append({"loss": 0.0, "num_tokens": 0.0})
    assert combine_metrics(parts) == {"loss": 1.5, "num_tokens": 4.0, "x": 3.0, "max_x": 7.0}


def test_a_process_that_nobody_started_with_others_is_rank_zero_of_one():
    ranks = init_distributed()
    assert (ranks.rank, ranks.world_size) == (0, 1)
