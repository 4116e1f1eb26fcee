"""Program of each of several ranks for test_sharded_checkpoint.py, which runs every case once and writes its findings as JSON.

`single` and `expected` are what one process does, for comparison.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import torch
from fsdp_ranks import SETTINGS, create_single_backend, optimizer_step
from fsdp_ranks import draw_step as make_rows

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.checkpoint import Progress, take_snapshot
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.fsdp.load import load_critic_on_meta, load_hf_model_on_meta, materialize_critic, materialize_from_hf
from rollouts.backends.fsdp.model import create_mesh, shard_model
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.ranks.distributed import barrier, init_distributed, leave_distributed
from rollouts.backends.weights.export import export_sharded
from rollouts.backends.weights.fill import FileWeights
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.heads import create_critic_model, create_reward_model, init_value_head, load_critic_model
from rollouts.models.weights import describe_model_weights, stream_weights
from rollouts.testing import create_tiny_model

FILE_BYTES = 6000  # of a file of an export: several files, each with several tensors


def make_model(seed: int = 0):
    """Sizes that no number of ranks divides."""
    return create_tiny_model(vocab_size=37, hidden_size=24, num_layers=2, seed=seed)


def make_backend(ranks, seed: int = 0, **options) -> FSDPTrainingBackend:
    create = partial(create_adamw_optimizer, lr=SETTINGS["lr"], eps=SETTINGS["eps"])
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=halve)
    return FSDPTrainingBackend(make_model(seed), create, create_schedule=schedule, ranks=ranks, max_grad_norm=0.3, **options)


def make_single(seed: int = 0):
    backend = create_single_backend(make_model(seed))
    backend.scheduler = torch.optim.lr_scheduler.LambdaLR(backend.optimizer, halve)
    return backend


def halve(step: int) -> float:
    return 0.5 ** (step // 2)


def train(backend, steps):
    return [optimizer_step(backend, make_rows(step), sft_loss, token_mean) for step in steps]


def differ(model, expected) -> bool:
    """Return whether the weights of two models differ, if only by one bit. All ranks call it."""
    found, wanted = dict(stream_weights(model)), dict(stream_weights(expected))
    return list(found) != list(wanted) or any(not torch.equal(found[name], wanted[name]) for name in found)


def message(function, *arguments, **options) -> str:
    try:
        function(*arguments, **options)
    except (CheckpointError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def shard(model, ranks, **config):
    config = FSDPConfig(**config)
    return shard_model(model, create_mesh(config, ranks.device, ranks.world_size), config)


def load_in_parts(ranks, folder: Path):
    directory = folder / "model"
    model = shard(load_hf_model_on_meta(directory), ranks)
    read = materialize_from_hf(model, directory, "cpu")
    weights = describe_model_weights(model)
    own = {id(p): p.to_local().numel() * 4 for p in model.parameters()}
    return {
        "differs": differ(model, make_model()),
        "read": read,
        "held": sum(own.values()),
        "size": sum(spec.num_bytes for spec in weights),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "eos": model.generation_config.eos_token_id,
        "dtype": str(model.lm_head.weight.dtype),
        "half_differs": differ(*load_half(ranks, folder)),
    }


def load_half(ranks, folder: Path):
    """A checkpoint in bfloat16 becomes float32, rounded as it is."""
    model = shard(load_hf_model_on_meta(folder / "half"), ranks)
    materialize_from_hf(model, folder / "half", "cpu")
    return model, make_model().to(torch.bfloat16).float()


def load_others(ranks, folder: Path):
    """Critics from every directory that a critic can come from; the names of those that differ."""
    wrong = []
    for name in ("model", "critic", "scorer"):
        critic = shard(load_critic_on_meta(folder / name), ranks)
        materialize_critic(critic, folder / name, "cpu", seed=7)
        wrong += [name] * differ(critic, load_critic_model(folder / name, seed=7))
    return wrong


def refuse_to_load(ranks, folder: Path):
    found = {}
    for name in ("cut", "lacking", "narrow", "empty"):
        model = shard(load_hf_model_on_meta(folder / "model"), ranks)
        found[name] = message(materialize_from_hf, model, folder / name, "cpu")
        assert all(p.is_meta for p in model.parameters()), f"{name}: something was loaded before it was refused"
    return found


def export(ranks, folder: Path):
    """Many files, then one in the same place; copies on every rank; a place where nothing can be written."""
    target = folder / "export"
    model = shard(make_model(5), ranks)
    found = {}
    for name, size in (("many", FILE_BYTES), ("one", 1 << 30)):
        export_sharded(model, target, ranks=ranks, max_file_bytes=size)
        found[name] = sorted(path.name for path in target.glob("model*"))
        reread = shard(load_hf_model_on_meta(target), ranks)
        materialize_from_hf(reread, target, "cpu")
        found[f"{name} differs"] = differ(reread, make_model(5))
        if ranks.rank == 0:
            shutil.copytree(target, folder / name)
        barrier(ranks)
    export_sharded(shard(make_model(6), ranks, sharding_strategy="no_shard"), folder / "copies", ranks=ranks, max_file_bytes=FILE_BYTES)
    found["refused"] = message(export_sharded, model, folder / "nowhere", ranks=ranks, max_file_bytes=FILE_BYTES)
    return found


def save_and_load(ranks, folder: Path):
    """Two steps, saved; two more steps, which are made again after loading."""
    backend = make_backend(ranks)
    train(backend, range(2))
    backend.weight_version = 9
    backend.save_checkpoint(folder / "saved")
    found = {"expected": train(backend, range(2, 4))}
    again = make_backend(ranks, seed=1)
    torch.manual_seed(100 + ranks.rank)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    again.load_checkpoint(folder / "saved")
    found |= {"version": again.weight_version, "updates": again.counts.num_updates, "rng": bool(torch.equal(state, torch.get_rng_state()))}
    found |= {"again": train(again, range(2, 4)), "differs": differ(again.model, backend.model)}
    for name in ("of one process", "of one rank"):
        other = make_backend(ranks, seed=1)
        other.load_checkpoint(folder / name)
        found[name] = train(other, range(2, 4))
    fresh = make_backend(ranks)
    fresh.save_checkpoint(folder / "before the first step")
    other = make_backend(ranks, seed=1)
    train(other, range(1))
    other.load_checkpoint(folder / "before the first step")
    found["first"] = [train(fresh, range(1)), train(other, range(1))]
    return found


def save_adapters(ranks, folder: Path):
    """Adapters on frozen shards: merged weights at the top, and a checkpoint that goes on."""
    options = {"lr": SETTINGS["lr"], "eps": SETTINGS["eps"], "lora": LoRAConfig(rank=2), "ranks": ranks}
    backend = create_fsdp_backend(make_model(), **options)
    train(backend, range(2))
    backend.save_checkpoint(folder / "adapted")
    found = {"merged": not differ_from_files(backend.model, folder / "adapted")}
    found["expected"] = train(backend, range(2, 4))
    again = create_fsdp_backend(make_model(), **options)
    again.load_checkpoint(folder / "adapted")
    found["again"] = train(again, range(2, 4))
    found["without"] = message(make_backend(ranks).load_checkpoint, folder / "adapted")
    found["with"] = message(again.load_checkpoint, folder / "saved")
    return found


def differ_from_files(model, directory: Path) -> bool:
    """Return whether the weights of a model, with adapters merged, differ from those of a directory. All ranks call it."""
    with FileWeights(directory) as files:
        there = {name: files.read(name, tuple(slice(0, n) for n in shape)) for name, shape in files.shapes.items()}
        return any(not torch.equal(value, there[name]) for name, value in stream_weights(model) if name in there)


def save_beside(ranks, folder: Path):
    """Training goes on while a checkpoint is written: it has what was there when save_checkpoint returned."""
    backend = make_backend(ranks, save_in_background=True)
    train(backend, range(2))
    future = backend.save_checkpoint(folder / "beside")
    state = backend.model, backend.optimizer, backend.scheduler, Progress(backend.counts, 0)
    snapshot = take_snapshot(*state, ranks=ranks, copied=True)
    values = [piece.values for piece in snapshot.pieces] + [getattr(x, "_local_tensor", x) for x in snapshot.tensors.values()]
    before = [x.clone() for x in values]
    found = {"expected": train(backend, range(2, 4))}
    found["copied"] = all(map(torch.equal, before, values))
    future.wait()
    again = make_backend(ranks, seed=1)
    again.load_checkpoint(folder / "beside")
    found["again"] = train(again, range(2, 4))
    (folder / "staged").mkdir(exist_ok=True)
    write = again.stage_checkpoint(folder / "staged").value
    found["straight"] = train(again, range(4, 6))
    write()
    again = make_backend(ranks, seed=1)
    again.load_checkpoint(folder / "staged")
    found["staged"] = train(again, range(4, 6))
    found["refused"] = message(again.stage_checkpoint(folder / "nowhere").value)
    again.stage_checkpoint(folder / "staged").value()
    backend.save_checkpoint(folder / "nowhere")
    found["next"] = message(backend.save_checkpoint, folder / "after")
    backend.save_checkpoint(folder / "nowhere")
    found["close"] = message(backend.close)
    return found


def refuse_to_restore(ranks, folder: Path):
    """Damaged checkpoints, the same error on every rank, and nothing is changed."""
    kinds = {
        "no state": lambda d: shutil.rmtree(d / "sharded"),
        "no random state": lambda d: (d / "sharded" / "rng_00001.pt").unlink(),
        "cut state": lambda d: cut(d / "sharded" / "trainer.pt"),
        "cut shard": lambda d: cut(d / "sharded" / "__1_0.distcp"),
        "no index": lambda d: (d / "sharded" / ".metadata").unlink(),
        "cut weights": lambda d: cut(d / "model.safetensors"),
        "another model": lambda d: (d / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 4096})),
        "later format": lambda d: torch.save({"format": 99}, d / "sharded" / "trainer.pt"),
        "another kind": lambda d: (shutil.rmtree(d / "sharded"), torch.save({"kind": "jax"}, d / "trainer_state.pt")),
    }
    found = {}
    backend = make_backend(ranks, seed=2)
    train(backend, range(1))
    before = [p.to_local().clone() for p in backend.model.parameters()]
    for name, damage in kinds.items():
        target = folder / "damaged" / name
        if ranks.rank == 0:
            shutil.copytree(folder / "saved", target)
            damage(target)
        barrier(ranks)
        found[name] = message(backend.load_checkpoint, target)
        assert all(map(torch.equal, before, (p.to_local() for p in backend.model.parameters()))), f"{name}: weights were changed"
        assert backend.counts.num_updates == 1
    plain = make_backend(ranks)
    plain.optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    found["another optimizer"] = message(plain.load_checkpoint, folder / "saved")
    return found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def prepare(folder: Path) -> None:
    """Model directories of every kind, and checkpoints of one process. Done before the ranks start."""
    from safetensors.torch import load_file, save_file

    make_model().save_pretrained(folder / "model", max_shard_size="6KB")
    make_model().to(torch.bfloat16).save_pretrained(folder / "half")
    critic = create_critic_model(make_model(1), seed=1)
    critic.save_pretrained(folder / "critic")
    scorer = create_reward_model(make_model(2), seed=2)
    init_value_head(scorer, seed=3)
    scorer.save_pretrained(folder / "scorer")
    for name in ("cut", "lacking", "narrow", "empty"):
        make_model().save_pretrained(folder / name)
    path = "model.safetensors"
    cut(folder / "cut" / path)
    weights = load_file(folder / "lacking" / path)
    save_file({name: x for name, x in weights.items() if "layers.1.mlp.up_proj" not in name}, folder / "lacking" / path)
    save_file(weights | {"model.norm.weight": torch.zeros(7)}, folder / "narrow" / path)
    (folder / "empty" / path).rename(folder / "empty" / "adapter_model.safetensors")
    places = ("export", "copies", "saved", "of one process", "of one rank", "before the first step", "beside", "after", "damaged")
    for name in (*places, "adapted"):
        (folder / name).mkdir()


def main(folder: Path) -> None:
    ranks = init_distributed(timeout_s=60, init_method="env://")
    torch.manual_seed(100 + ranks.rank)  # of dropout, which these models have not: it is there to be restored
    found = {
        "save_and_load": save_and_load(ranks, folder),
        "load_in_parts": load_in_parts(ranks, folder),
        "load_others": load_others(ranks, folder),
        "refuse_to_load": refuse_to_load(ranks, folder),
        "export": export(ranks, folder),
        "save_adapters": save_adapters(ranks, folder),
        "save_beside": save_beside(ranks, folder),
        "refuse_to_restore": refuse_to_restore(ranks, folder),
    }
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))
    leave_distributed()


def resume(folder: Path) -> None:
    """Resume on another number of ranks."""
    ranks = init_distributed(timeout_s=60, init_method="env://")
    backend = make_backend(ranks, seed=1)
    backend.load_checkpoint(folder / "saved")
    drawn = float(torch.rand(()))
    model = shard(load_hf_model_on_meta(folder / "model"), ranks)
    read = materialize_from_hf(model, folder / "model", "cpu")
    found = {"again": train(backend, range(2, 4)), "drawn": drawn, "read": read, "differs": differ(model, make_model())}
    (folder / f"resumed_{ranks.rank}.json").write_text(json.dumps(found))
    leave_distributed()
