"""engine.weight_sync: what each engine can do, said before a run; channels to servers and fleets; directories under other paths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
import torch
import trio
from endless_models import create_endless_model
from server_waits import PATIENCE_S
from test_weight_streams import make_backend

from integration.parts.engines import (
    check_weight_sync,
    create_server_config,
    find_server_devices,
    open_weight_channel,
    prepare_initial_model,
)
from integration.settings.config import Config
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.model import ModelSection
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.weights.path_map import PathMap
from rollouts.errors import ConfigError, EngineError
from rollouts.testing import FakeSGLangServer, FakeVLLMServer, Fault, VLLMSettings, create_tiny_model
from rollouts.training.weight_sync import publish_weights, write_weight_version
from rollouts.types import SamplingParams

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
URL = "http://127.0.0.1:1"
LAUNCH = {"launch": True, "num_servers": 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "inprocess", "weight_sync": "group"}, "in the trainer's process: use memory"),
        ({"kind": "vllm", "urls": (URL,), "weight_sync": "memory"}, "no weights in requests"),
        ({"kind": "sglang", "urls": ("http://gpu7:30000",), "weight_sync": "ipc"}, "within one machine"),
        ({"kind": "sglang", **LAUNCH, "weight_sync": "group"}, "set engine.on_server_death to stop"),
        ({"kind": "sglang", **LAUNCH, "weight_sync": "ipc", "on_server_death": "stop", "updates_at_once": 1}, "all servers at once"),
        ({"kind": "sglang", "urls": (URL,), "weight_sync": "group", "path_map": ("/a=/b",)}, "applies to directories"),
        ({"kind": "sglang", "urls": (URL,), "weight_sync": "fax"}, "auto, disk, memory, group or ipc"),
        ({"kind": "sglang", "urls": (URL,), "path_map": ("/a",)}, "write the prefix here"),
        ({"kind": "sglang", "urls": (URL,), "weight_sync_mib": 0}, "weight_sync_mib"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_a_reason(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineSection(**settings)


def test_vllm_on_a_cpu_takes_weights_from_the_disk_only():
    for how in ("group", "ipc"):
        section = EngineSection(kind="vllm", launch=True, weight_sync=how)
        with pytest.raises(ConfigError, match="the model is on the CPU"):
            check_weight_sync(section, device="cpu")
        check_weight_sync(replace(section, kind="sglang"), device="cpu")


def test_a_server_that_is_started_is_told_how_weights_come():
    def build(**settings):
        return create_server_config(EngineSection(launch=True, **settings), "m", {}, device="cpu")

    assert build(kind="vllm", weight_sync="group").extra_args == ("--weight-transfer-config", '{"backend": "nccl"}')
    ipc = build(kind="vllm", weight_sync="ipc", extra_args=("--x",))
    assert ipc.extra_args == ("--weight-transfer-config", '{"backend": "ipc"}', "--x")
    assert ipc.env == {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    for plain in (build(kind="vllm"), build(kind="sglang", weight_sync="group")):
        assert (plain.extra_args, plain.env) == ((), {})


def test_the_gpus_of_the_servers_are_named_as_this_process_numbers_them():
    section = EngineSection(kind="sglang", launch=True, weight_sync="ipc", gpus=("5", "3"), tensor_parallel_size=2)
    cuda = torch.device("cuda")
    assert find_server_devices(section, cuda, {"CUDA_VISIBLE_DEVICES": "2,3,5"}) == [torch.device("cuda", 2), torch.device("cuda", 1)]
    assert find_server_devices(replace(section, gpus=()), cuda, {"CUDA_VISIBLE_DEVICES": "2,3,5"}) == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    with pytest.raises(ConfigError, match="'5', which this process does not see"):
        find_server_devices(section, cuda, {"CUDA_VISIBLE_DEVICES": "2,3"})


def test_how_the_loop_is_told():
    modes = {
        ("inprocess", "auto"): "memory",
        ("inprocess", "disk"): "checkpoint",
        ("vllm", "auto"): "checkpoint",
        ("vllm", "group"): "channel",
        ("sglang", "memory"): "channel",
        ("sglang", "ipc"): "channel",
    }
    for (kind, how), mode in modes.items():
        urls = () if kind == "inprocess" else (URL,)
        assert EngineSection(kind=kind, urls=urls, weight_sync=how).weight_sync_mode == mode
    assert EngineSection(kind="sglang", urls=(URL, URL), weight_sync="memory").weight_sync_mode == "memory"


@pytest.mark.parametrize("how", ["memory", "group", "ipc"])
async def test_a_run_opens_the_channel_that_its_settings_name(tmp_path: Path, how: str):
    create_tiny_model(seed=1).save_pretrained(tmp_path)
    async with FakeSGLangServer(tmp_path) as server, SGLangEngine(server.url) as engine:
        config = Config(model=ModelSection(), engine=EngineSection(kind="sglang", urls=(server.url,), weight_sync=how))
        async with open_weight_channel(config, [engine], {}) as channel:
            served = await publish_weights(make_backend(), [engine], version=1, exports=None, channel=channel)
        assert (served.version, await engine.get_weight_version()) == (1, 1)
    async with open_weight_channel(Config(), [], {}) as channel:
        assert channel is None


async def test_a_fleet_takes_the_weights_of_a_group_as_one_engine(tmp_path: Path):
    create_tiny_model(seed=1).save_pretrained(tmp_path)
    async with (
        FakeSGLangServer(tmp_path) as one,
        FakeSGLangServer(tmp_path) as two,
        SGLangEngine(one.url, name="the first") as first,
        SGLangEngine(two.url, name="the second") as second,
        EngineFleet([first, second], say=lambda text: None) as fleet,
    ):
        section = EngineSection(kind="sglang", urls=(one.url, two.url), weight_sync="group")
        async with open_weight_channel(Config(engine=section), [fleet], {}) as channel:
            await publish_weights(make_backend(), [fleet], version=1, exports=None, channel=channel)
            assert [await engine.get_weight_version() for engine in (fleet, first, second)] == [1, 1, 1]
            assert [member.version for member in fleet.members] == [1, 1]
            assert await first.compute_checksum() == await second.compute_checksum()
            two.add_fault(Fault("status", "/update_weights_from_distributed", status=400, body='{"success": false, "message": "no room"}'))
            with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="no room"):
                await publish_weights(make_backend(2), [fleet], version=2, exports=None, channel=channel)


async def test_a_member_that_is_down_keeps_a_group_from_being_updated(tmp_path: Path):
    create_tiny_model(seed=1).save_pretrained(tmp_path)
    async with (
        FakeSGLangServer(tmp_path) as one,
        FakeSGLangServer(tmp_path) as two,
        SGLangEngine(one.url) as first,
        SGLangEngine(two.url) as second,
        EngineFleet([first, second], say=lambda text: None) as fleet,
    ):
        section = EngineSection(kind="sglang", urls=(one.url, two.url), weight_sync="ipc")
        async with open_weight_channel(Config(engine=section), [fleet], {}) as channel:
            fleet.report_down(second, "its process ended")
            with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match=r"1 of 2 engines are down or leave.*its process ended"):
                await publish_weights(make_backend(), [fleet], version=1, exports=None, channel=channel)
        assert await first.get_weight_version() == 0


def test_paths_are_mapped_in_both_directions_by_the_first_prefix_that_fits():
    paths = PathMap.parse(["/data/runs=/mnt/runs", "/data=/other"])
    assert paths.to_server(Path("/data/runs/a/weights_v000001")) == PurePosixPath("/mnt/runs/a/weights_v000001")
    assert paths.to_server(Path("/data/x")) == PurePosixPath("/other/x")
    assert paths.to_server(Path("/datax")) == Path("/datax")
    assert paths.to_local("/mnt/runs/a") == Path("/data/runs/a")
    assert PathMap().to_local("m") == Path("m")


@pytest.mark.parametrize("kind", ["vllm", "vllm on a cpu", "sglang", "inprocess"])
async def test_every_engine_loads_a_directory_of_several_files_also_under_another_path(tmp_path: Path, kind: str):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.symlink_to(there)  # the same disk at two places
    old, new = create_endless_model(0), create_endless_model(1)
    prepare_initial_model(old, create_char_tokenizer(), None, here / "initial")
    new.save_pretrained(here / "new", max_shard_size="10KB")
    write_weight_version(here / "new", 4)
    assert len(list((here / "new").glob("model-*.safetensors"))) > 3
    paths = PathMap.parse([f"{here}={there}"])
    expected = tuple(new.generate(torch.tensor([[5, 9, 12]]), max_new_tokens=3, do_sample=False, pad_token_id=0)[0, 3:].tolist())

    async def check(engine) -> None:
        answer = await engine.update_weights_from_checkpoint(here / "new")
        completion = await engine.generate((5, 9, 12), GREEDY)
        assert (answer["weight_version"], completion.output_tokens, completion.output_versions) == (4, expected, (4,) * 3)

    if kind == "inprocess":
        async with InProcessEngine(old, create_char_tokenizer()) as engine:
            await check(engine)
    elif kind == "sglang":
        async with FakeSGLangServer(there / "initial") as server, SGLangEngine(server.url, path_map=paths) as engine:
            await check(engine)
            told = [request.json()["model_path"] for request in server.received if request.path == "/update_weights_from_disk"]
            assert told == [str(there / "new")]
            server.add_fault(Fault("status", "/update_weights_from_disk", status=400, body='{"success": false, "message": "no"}'))
            with pytest.raises(EngineError, match="goes on with the weights that it had before"):
                await engine.update_weights_from_checkpoint(here / "initial")
            assert server.core.model_path == str(there / "new")
    else:
        device = "cpu" if kind.endswith("cpu") else "cuda"
        settings = VLLMSettings(device=device)
        async with FakeVLLMServer(there / "initial", settings) as server, VLLMEngine(server.url, path_map=paths) as engine:
            await check(engine)
            (body,) = [request.json() for request in server.received if request.path == "/collective_rpc"]
            assert body["kwargs"]["weights_path"].startswith(str(there / "new"))
