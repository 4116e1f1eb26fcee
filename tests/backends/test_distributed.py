"""Exchanges between processes: one rank, two ranks, and errors of failed ones. The program of two ranks is distributed_ranks.py."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import Child
from rank_processes import PRELUDE, find_free_port, start_ranks

from rollouts.algorithms.advantages import normalize_by_group
from rollouts.algorithms.statistics import batch_std, whiten
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.ranks.distributed import (
    Ranks,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    explain_failures,
    gather_values,
    init_distributed,
    masked_normalization,
    masked_whiten,
    synchronize,
)
from rollouts.errors import BackendError
from rollouts.testing import create_tiny_model

CODE = """
sys.path.insert(0, {tests!r})
from pathlib import Path
import distributed_ranks
distributed_ranks.main(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the findings of each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    children = start_ranks(CODE.format(tests=str(Path(__file__).parents[1] / "support")), 2, folder, folder=folder / "output")
    try:
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
    finally:
        for child in children:
            child.kill()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_exchange_what_they_have(found):
    for rank, values in enumerate(part["exchanges"] for part in found):
        assert values["rank"] == [rank, 2]
        assert values["all_reduce"] == [3.0, 6.0]
        assert values["all_gather"] == [[1.0, 2.0], [2.0, 4.0]]
        assert values["broadcast"] == [2.0, 4.0]
        assert values["gather_values"] == [{"rank": 0}, {"rank": 1}]
        assert values["unchanged"] == [1.0 + rank, 2.0 + 2 * rank], "what was given was written over"
        assert values["again"] == rank, "joining twice is joining once"


@pytest.mark.slow
def test_entries_of_two_ranks_are_whitened_as_those_of_one_process_are(found):
    zero, one = (part["exchanges"] for part in found)
    for values in (zero, one):
        assert values["whitened"] < 1e-6
        assert values["normalized"] < 1e-6
    assert zero["empty"] < 1e-6
    assert one["empty"] == [0, 5], "a rank without rows"


@pytest.mark.slow
def test_a_late_rank_is_told_by_the_operation_that_waited_for_it(found):
    message = found[0]["failures"]["late"]
    assert "adding up the losses on rank 0 of 2 was not finished within 0.5 s" in message
    assert "raise the timeout" in message


@pytest.mark.slow
def test_a_lost_rank_is_told_by_the_operation_that_needed_it(found):
    message = found[0]["failures"]["lost"]
    assert "waiting for the others on rank 0 of 2: the connection to another rank is lost" in message


def test_one_rank_exchanges_with_nobody():
    ranks = init_distributed()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    mask = (x > -1).float()
    barrier(ranks)
    for found in (all_reduce(ranks, x), all_gather(ranks, x)[0], broadcast(ranks, x)):
        assert torch.equal(found, x)
        assert found.data_ptr() != x.data_ptr()
    assert gather_values(ranks, "mine") == ["mine"]
    torch.testing.assert_close(masked_whiten(ranks, x, mask, epsilon=0.0), whiten(x, mask, epsilon=0.0))
    synchronize(torch.device("cpu"))


def test_normalized_entries_have_mean_zero_and_deviation_one():
    x = 5 + 3 * torch.randn(20, 9, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(180).reshape(20, 9) % 4 > 0).float()
    everything = torch.zeros(len(x), dtype=torch.int64)
    expected = normalize_by_group(x, everything, mask=mask, std_level=partial(batch_std, unbiased=False), epsilon=1e-5)
    for ranks in (None, init_distributed()):
        found = masked_normalization(x, mask, ranks=ranks)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        assert found.dtype == x.dtype
        assert (found[mask == 0] == 0).all()
        assert float(found[mask > 0].mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(found[mask > 0].std(unbiased=False)) == pytest.approx(1.0, abs=1e-5)


def test_processes_that_do_not_come_are_an_error_that_says_so(tmp_path: Path):
    code = """
from rollouts.backends.ranks.distributed import init_distributed
from rollouts.backends.factory import create_pytorch_backend
from rollouts.errors import BackendError
try:
    init_distributed(timeout_s=0.5, init_method="env://")
except BackendError as error:
    print("told:", str(error).replace(chr(10), " "))
"""
    with Child(PRELUDE + code, 0, 2, find_free_port(), folder=tmp_path) as child:
        assert child.wait() == 0, child.error
        assert "joining the other processes failed (rendezvous env://" in child.out
        assert "timeout 0.5 s" in child.out


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ('WORLD_SIZE="1", RANK="0"', "rank 0 of 1"),
        ('WORLD_SIZE="2", MASTER_ADDR=""', "joining the other processes failed (rendezvous env://"),  # not rank 0 of 1
    ],
)
def test_one_of_several_processes_of_any_launcher_is_not_taken_for_the_only_one(tmp_path: Path, settings: str, told: str):
    code = f"""
import os
del os.environ["TORCHELASTIC_RUN_ID"], os.environ["TORCHELASTIC_USE_AGENT_STORE"]
os.environ.update({settings})
from rollouts.backends.ranks.distributed import init_distributed
from rollouts.backends.factory import create_pytorch_backend
from rollouts.errors import BackendError
try:
    ranks = init_distributed(timeout_s=0.5)
    print("rank", ranks.rank, "of", ranks.world_size)
except BackendError as error:
    print("told:", str(error).replace(chr(10), " "))
"""
    with Child(PRELUDE + code, 1, 2, find_free_port(), folder=tmp_path) as child:
        assert child.wait() == 0, child.error
        assert told in child.out


def test_a_backend_of_one_process_warns_where_several_were_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 2.*create_fsdp_backend") as told:
        create_pytorch_backend(create_tiny_model(), lr=1e-3)
    assert [warning.filename for warning in told] == [__file__]
    monkeypatch.setenv("WORLD_SIZE", "1")
    create_pytorch_backend(create_tiny_model(), lr=1e-3)
    assert len(told) == 1


def test_other_errors_pass_an_exchange_as_they_are():
    ranks = Ranks(rank=1, world_size=4, device=torch.device("cpu"), timeout_s=3.0)
    with pytest.raises(RuntimeError, match=r"^shapes differ$") as caught, explain_failures(ranks, "forward"):
        raise RuntimeError("shapes differ")
    assert not isinstance(caught.value, BackendError)
    with pytest.raises(BackendError, match="forward on rank 1 of 4 failed: store") as caught, explain_failures(ranks, "forward"):
        raise torch.distributed.DistStoreError("store")
    with pytest.raises(AssertionError, match="rank is 4 of 4"):
        Ranks(rank=4, world_size=4, device=torch.device("cpu"), timeout_s=3.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_run_models_with_their_own_attention_as_one_process_does(tmp_path: Path):
    """Each rank makes a pass for each distinct length of its rows, and as many as the others."""
    code = CODE.replace("distributed_ranks", "native_ranks").format(tests=str(Path(__file__).parents[1] / "support"))
    children = start_ranks(code, 2, tmp_path, folder=tmp_path / "output")
    try:
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
    finally:
        for child in children:
            child.kill()
    zero, one = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert zero.keys() == one.keys() and len(zero) == 6
    for name, runs in zero.items():
        assert runs["ranks"] == one[name]["ranks"], name
        for found, expected in zip(runs["ranks"], runs["single"], strict=True):
            assert found == pytest.approx(expected, abs=1e-4), name
