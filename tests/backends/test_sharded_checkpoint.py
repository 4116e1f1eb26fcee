"""Sharded models are loaded, exported, saved and restored in parts. The program of several ranks is sharded_ranks.py."""

from __future__ import annotations

import json
import os
import stat
from functools import partial
from pathlib import Path

import pytest
import sharded_ranks
import torch
from rank_processes import start_ranks
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rollouts.backends.ranks.distributed import init_distributed
from rollouts.backends.weights import fill as weight_sources
from rollouts.backends.weights.export import alone, export_sharded, plan_files
from rollouts.backends.weights.fill import FileWeights
from rollouts.engines.weights.checkpoint_check import check_checkpoint, read_checkpoint_layout
from rollouts.errors import CheckpointError
from rollouts.models.weights import read_weights, stream_weights
from rollouts.weight_specs import WeightSpec

CODE = """
sys.path.insert(0, {tests!r})
from pathlib import Path
import sharded_ranks
sharded_ranks.{function}(Path(sys.argv[1]))
"""


def run_ranks(function: str, num_ranks: int, folder: Path) -> None:
    code = CODE.format(tests=str(Path(__file__).parents[1] / "support"), function=function)
    children = start_ranks(code, num_ranks, folder, folder=folder / f"output_{function}")
    try:
        assert [child.wait() for child in children] == [0] * num_ranks, [child.error for child in children]
    finally:
        for child in children:
            child.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder in which two ranks have run every case once."""
    folder = tmp_path_factory.mktemp("sharded")
    sharded_ranks.prepare(folder)
    for name, backend in (("of one process", sharded_ranks.make_single()), ("of one rank", sharded_ranks.make_backend(init_distributed()))):
        sharded_ranks.train(backend, range(2))
        backend.save_checkpoint(folder / name)
    run_ranks("main", 2, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """Return the findings of each of two ranks."""
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_no_rank_reads_or_holds_more_than_its_part_of_a_model(found):
    parts = [rank["load_in_parts"] for rank in found]
    assert sum(part["read"] for part in parts) == sum(part["held"] for part in parts) == parts[0]["size"], "something was read twice"
    for part in parts:
        assert part["read"] < 0.52 * part["size"]
        assert not part["differs"]
        assert part["tied"]
        assert part["eos"] == 1
        assert part["dtype"] == "torch.float32"
        assert not part["half_differs"]


@pytest.mark.slow
def test_critics_and_copies_have_the_numbers_of_one_process(found):
    assert [rank["load_others"] for rank in found] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cut", "is not a complete safetensors file"),
        ("lacking", "missing ['model.layers.1.mlp.up_proj.weight']"),
        ("narrow", "model.norm.weight is (7,), expected (24,)"),
        ("empty", "has no model.safetensors"),
    ],
)
def test_directories_that_do_not_fit_are_refused_before_anything_is_loaded(found, name: str, said: str):
    for text in (rank["refuse_to_load"][name] for rank in found):
        assert text.startswith("ConfigError")
        assert said in text


@pytest.mark.slow
def test_ranks_write_the_files_of_an_export_and_servers_and_transformers_open_them(found, folder):
    assert len(found[0]["export"]["many"]) > 4
    assert found[0]["export"]["many"] == found[1]["export"]["many"]
    assert found[0]["export"]["one"] == ["model.safetensors"], "files of an earlier export are left"
    expected = dict(stream_weights(sharded_ranks.make_model(5)))
    reference = read_checkpoint_layout(folder / "model")
    for name in ("many", "one"):
        assert not any(rank["export"][f"{name} differs"] for rank in found)
        layout = check_checkpoint(folder / name, reference)
        assert "lm_head.weight" not in layout.tensors
        opened = AutoModelForCausalLM.from_pretrained(folder / name)
        assert {key: torch.equal(value, expected[key]) for key, value in opened.state_dict().items()} == dict.fromkeys(expected, True)
        assert {stat.S_IMODE(path.stat().st_mode) for path in (folder / name).glob("*.safetensors")} == {0o644}
        assert not list((folder / name).glob("*.partial"))
        for file in ("config.json", "generation_config.json"):
            assert json.loads((folder / name / file).read_text()) == json.loads((folder / "model" / file).read_text())


@pytest.mark.slow
def test_a_model_of_which_each_rank_has_a_copy_is_written_once(folder):
    opened = AutoModelForCausalLM.from_pretrained(folder / "copies")
    expected = dict(stream_weights(sharded_ranks.make_model(6)))
    assert all(torch.equal(value, expected[name]) for name, value in opened.state_dict().items())


@pytest.mark.slow
def test_what_one_rank_cannot_write_is_an_error_on_all(found):
    zero, one = (rank["export"]["refused"] for rank in found)
    assert zero == one
    assert "rank 0: [Errno 2]" in zero
    assert "rank 1: [Errno 2]" in zero


@pytest.mark.slow
def test_the_same_number_of_ranks_goes_on_bit_for_bit(found):
    for rank in (rank["save_and_load"] for rank in found):
        assert rank["again"] == rank["expected"]
        assert not rank["differs"]
        assert (rank["version"], rank["updates"], rank["rng"]) == (9, 2, True)
        assert rank["first"][0] == rank["first"][1], "state of an optimizer that has made no step"


def check_close(steps, expected) -> None:
    for step, wanted in zip(steps, expected, strict=True):
        assert step == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["of one process", "of one rank"])
def test_two_ranks_go_on_where_one_was(found, folder, name: str):
    backend = sharded_ranks.make_single(1) if name == "of one process" else sharded_ranks.make_backend(init_distributed(), seed=1)
    backend.load_checkpoint(folder / name)
    check_close(found[0]["save_and_load"][name], sharded_ranks.train(backend, range(2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one process", "one rank"])
def test_one_goes_on_where_two_ranks_were(found, folder, kind: str):
    backend = sharded_ranks.make_single(1) if kind == "one process" else sharded_ranks.make_backend(init_distributed(), seed=1)
    backend.load_checkpoint(folder / "saved")
    assert (backend.weight_version, backend.counts.num_updates) == (9, 2)
    check_close(sharded_ranks.train(backend, range(2, 4)), found[0]["save_and_load"]["expected"])


@pytest.mark.slow
def test_three_ranks_go_on_where_two_were(found, folder):
    run_ranks("resume", 3, folder)
    resumed = [json.loads((folder / f"resumed_{rank}.json").read_text()) for rank in range(3)]
    for rank in resumed:
        check_close(rank["again"], found[0]["save_and_load"]["expected"])
        assert not rank["differs"]
    assert len({rank["drawn"] for rank in resumed}) == 3, "two ranks have the same random state"
    assert sum(rank["read"] for rank in resumed) == found[0]["load_in_parts"]["size"]


@pytest.mark.slow
def test_adapters_on_shards_are_saved_with_merged_weights_and_restored(found, folder):
    for rank in (rank["save_adapters"] for rank in found):
        assert rank["merged"], "what servers are to load is not what was trained"
        assert rank["again"] == rank["expected"]
        assert "was written by a backend that trains adapters" in rank["without"]
        assert "has no adapters" in rank["with"]
    assert AutoModelForCausalLM.from_pretrained(folder / "adapted").num_parameters() == sharded_ranks.make_model().num_parameters()


@pytest.mark.slow
def test_a_checkpoint_is_written_while_training_goes_on(found):
    for rank in (rank["save_beside"] for rank in found):
        assert rank["copied"], "training wrote over what is to be saved"
        assert rank["again"] == rank["expected"], "the checkpoint has not what was there when it was begun"


@pytest.mark.slow
def test_a_staged_checkpoint_is_whole_when_its_function_returns_and_its_error_is_told_by_it_alone(found):
    for rank in (rank["save_beside"] for rank in found):
        assert rank["staged"] == rank["straight"]
        assert rank["refused"].startswith("CheckpointError")


@pytest.mark.slow
def test_an_error_of_writing_beside_training_comes_with_the_next_save_or_the_end(found):
    for rank in (rank["save_beside"] for rank in found):
        for text in (rank["next"], rank["close"]):
            assert text.startswith("CheckpointError")
            assert "nowhere" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no state", "it is a model, not a checkpoint"),
        ("no random state", "rng_00001.pt is missing or damaged"),
        ("cut state", "trainer.pt is damaged"),
        ("cut shard", "cannot be read"),
        ("no index", "cannot be read"),
        ("cut weights", "is not a complete safetensors file"),
        ("another model", "hidden_size is 4096, expected 24"),
        ("later format", "has format 99, this version reads format 1"),
        ("another kind", "is of the backend 'jax'"),
        ("another optimizer", "has the state of AdamW, but the optimizer is SGD"),
    ],
)
def test_checkpoints_that_cannot_be_restored_are_refused_on_all_ranks_alike(found, name: str, said: str):
    zero, one = (rank["refuse_to_restore"][name] for rank in found)
    assert zero == one
    assert zero.startswith("CheckpointError")
    assert said in zero


def test_a_model_in_one_process_is_exported_the_same_way(tmp_path: Path):
    old = os.umask(0o077)
    try:
        export_sharded(sharded_ranks.make_model(), tmp_path, ranks=alone(), max_file_bytes=sharded_ranks.FILE_BYTES)
    finally:
        os.umask(old)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = dict(stream_weights(sharded_ranks.make_model()))
    assert all(torch.equal(value, expected[name]) for name, value in opened.state_dict().items())
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.safetensors")} == {0o644}


def test_tied_weights_travel_once_to_engines():
    backend = sharded_ranks.make_backend(init_distributed())
    names = [spec.name for spec in backend.describe_weights().value]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert list(backend.gather_weights(names).value) == names


def test_settings_of_generation_that_contradict_each_other_are_exported_as_they_are(tmp_path: Path):
    model = sharded_ranks.make_model()
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    export_sharded(model, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.temperature == 0.6


def test_any_error_of_rank_0_in_an_export_is_told_to_all_ranks(tmp_path: Path):
    class Unwritable:
        def save_pretrained(self, directory: Path) -> None:
            raise ValueError("a template that cannot be written")

    with pytest.raises(CheckpointError, match=r"finishing the export.*cannot be written"):
        export_sharded(sharded_ranks.make_model(), tmp_path, Unwritable())


@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True)])
def test_an_export_that_dies_half_way_leaves_no_mixture_of_two_models(tmp_path: Path, monkeypatch, parts: tuple[bool, bool]):
    """Wherever it dies: what opens is one of the two, whole."""
    model = sharded_ranks.make_model()
    size = sum(value.nbytes for value in model.state_dict().values())

    def export(number: int, in_parts: bool) -> None:
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(number)
            model.model.norm.weight.fill_(number)
        export_sharded(model, tmp_path, max_file_bytes=size // 2 if in_parts else size)

    def number_of(tensors) -> set[float]:
        return {tensors(name).flatten()[0].item() for name in ("model.embed_tokens.weight", "model.norm.weight")}

    def outcome() -> str:
        try:
            with FileWeights(tmp_path) as weights:
                found = number_of(lambda name: weights.read(name, tuple(slice(0, size) for size in weights.shapes[name])))
            assert number_of(read_weights(tmp_path).__getitem__) == found
        except CheckpointError as error:
            assert "export" in str(error) or "no model.safetensors" in str(error)
            return "refused"
        return str(found)

    class Killed(BaseException): ...

    seen: list[str] = []
    for allowed in range(20):
        for path in tmp_path.glob("model*"):
            path.unlink()
        export(1, parts[0])
        left = [allowed]

        def step(real, *arguments, left=left, **options):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", partial(step, os.replace))
            patch.setattr(Path, "unlink", lambda self, real=Path.unlink, **options: step(real, self, **options))
            try:
                export(2, parts[1])
            except Killed:
                seen.append(outcome())
            else:
                break
    assert outcome() == "{2.0}"
    assert set(seen) <= {"{1.0}", "{2.0}", "refused"}
    assert len(seen) > 2


def test_weights_that_are_replaced_while_they_are_opened_are_refused(tmp_path: Path, monkeypatch):
    model = sharded_ranks.make_model()
    export_sharded(model, tmp_path, max_file_bytes=sharded_ranks.FILE_BYTES)
    opened: list[Path] = []

    def open_late(path: Path, **options):
        opened.append(path)
        if len(opened) == 2:
            export_sharded(model, tmp_path, max_file_bytes=sharded_ranks.FILE_BYTES)
        return safe_open(path, **options)

    monkeypatch.setattr(weight_sources, "safe_open", open_late)
    with pytest.raises(CheckpointError, match="were replaced while they were opened"):
        FileWeights(tmp_path)


def test_files_of_an_export_are_planned_by_size_and_wide_numbers_come_first():
    sizes = (("a", "bfloat16", (3,)), ("b", "float32", (2, 2)), ("c", "float32", (100,)), ("d", "float32", ()))
    specs = [WeightSpec(*size) for size in sizes]
    files = plan_files(specs, 22)
    assert [[spec.name for spec in file.specs] for file in files] == [["b", "a"], ["c"], ["d"]]
    assert [file.name for file in files] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(offset % 4 == 0 for file in files for offset in file.offsets)
    assert files[0].num_bytes == len(files[0].header) + 22
