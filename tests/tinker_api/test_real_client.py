"""The server with the real tinker client and recipes of tinker-cookbook, which run unchanged in an environment of their own."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
from pathlib import Path

import needs
import pytest
import torch
import trio
from recordings import read_rows, to_rows, write_rows
from test_tinker_server import check_told

from rollouts.testing import create_tiny_model
from rollouts.tinker import open_tinker_server

PROGRAM = Path(__file__).parent / "client_program.py"
SPLIT = r"\\boxed\{\w*\}|\w+|\s|[^\w\s]"
QUESTION = "What is three plus four?"
MODEL = "Qwen/Qwen3-8B-Base"  # a name that the cookbook knows; here a directory of a tiny model


def start(arguments, url, folder):
    """Run a program of the client's environment to its end; returns what it prints."""
    environment = os.environ | {
        "TINKER_API_KEY": "tml-any",
        "TINKER_BASE_URL": url,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([os.environ["TINKER_PYTHON"], *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@needs.TINKER
async def test_every_verb_by_the_real_client_and_its_requests_are_the_recorded_ones(tmp_path, monkeypatch):
    requests = []
    async with open_tinker_server(create_tiny_model(), directory=tmp_path / "saved") as server:
        handle = server._handle

        async def note(http):
            requests.append(http)
            return await handle(http)

        monkeypatch.setattr(server, "_handle", note)
        printed = await trio.to_thread.run_sync(start, [str(PROGRAM), server.url], server.url, tmp_path)
    told = json.loads(printed.splitlines()[-1])
    check_told(told)
    assert {name: message.partition(":")[0] for name, message in told["refused"].items()} == {
        "stable_reinforce": "BadRequestError",
        "two targets": "RequestFailedError",
        "outside": "RequestFailedError",
        "topk": "BadRequestError",
        "other model": "BadRequestError",
        "path": "BadRequestError",
        "name": "BadRequestError",
    }
    for name, words in {
        "stable_reinforce": "importance_sampling and cispo take the same data",
        "two targets": "data[1].loss_fn_inputs['target_tokens'] has the shape [2, 2], expected [2]",
        "outside": "data[0], with its last target, has the token id 9999",
        "topk": "topk_prompt_logprobs = 2 is not supported",
        "other model": "this server has one model, 'policy'",
        "path": "expected tinker://RUN/sampler_weights/NAME",
        "name": "'../x' cannot be a name of saved weights",
    }.items():
        assert words in told["refused"][name], told["refused"][name]
    session_id = told["info"]["model_id"].partition(":")[0]
    rows = to_rows(requests, session_id)
    if os.environ.get("TINKER_RECORD"):
        write_rows(rows)
    sent, known = (list_sent(found) for found in (rows, to_rows_of(read_rows(session_id), session_id)))
    assert sent == known


def to_rows_of(requests, session_id):
    from rollouts.gateway.http.connections import HTTPRequest

    found = [HTTPRequest(method=m, path=p, headers={"content-type": kind}, body=body) for m, p, kind, body in requests]
    return to_rows(found, session_id)


def list_sent(rows):
    """Requests in an order of their own, since those side by side may change places, without questions for results.

    A message in Protocol Buffers is the letters of its body: the entries of its maps come in any order.
    """
    found = []
    for method, path, kind, text in rows:
        body = base64.b64decode(text)
        if not path.endswith(("/retrieve_future", "/client/config", "/create_session")):  # the last two have the client's version
            found.append((method, path, kind, sorted(body) if "protobuf" in kind else body))
    return sorted(found)


def write_world(folder):
    """Directories of the names that the recipes ask for: a model with its tokenizer, and two data sets."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = (
        "User: Assistant: How many r's are in strawberry? Provide a numerical answer without units, written inside \\boxed{}.",
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions "
        "3, 8, and 9. \\boxed{3}\n\n",
        " ".join(f"\\boxed{{{k}}}" for k in range(10)),
        QUESTION,
    )
    words = dict.fromkeys(word for text in texts for word in re.findall(SPLIT, text))
    vocabulary = {word: k for k, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / MODEL)
    model = create_tiny_model(vocab_size=len(vocabulary))
    with torch.no_grad():  # adapters leave the output layer as it is, and the small numbers of a random one allow no sure choice
        model.get_output_embeddings().weight.mul_(10)
    model.save_pretrained(folder / MODEL)
    chats = folder / "HuggingFaceH4/no_robots"
    chats.mkdir(parents=True)
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "\\boxed{7}"}]
    (chats / "train.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 64)
    problems = folder / "openai/gsm8k"
    problems.mkdir(parents=True)
    (problems / "train.jsonl").write_text(f"{json.dumps({'question': QUESTION, 'answer': '#### 7'})}\n" * 256)
    (problems / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n")


def read_metrics(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@needs.TINKER
async def test_the_supervised_recipe_of_the_cookbook_learns_and_goes_on_where_it_stopped(tmp_path):
    from rollouts.models.loading import load_hf_model, load_tokenizer

    write_world(tmp_path)
    model, tokenizer = load_hf_model(tmp_path / MODEL), load_tokenizer(tmp_path / MODEL)
    recipe = ["-m", "tinker_cookbook.recipes.sl_loop", f"model_name={MODEL}", f"log_path={tmp_path / 'sl'}", "batch_size=4", "lora_rank=8"]
    settings = ["learning_rate=0.02", "save_every=4"]
    async with open_tinker_server(model, tokenizer, model_name=MODEL, directory=tmp_path / "saved") as server:
        await trio.to_thread.run_sync(start, [*recipe, *settings, "max_steps=6"], server.url, tmp_path)
        half = read_metrics(tmp_path / "sl")
        records = [json.loads(line) for line in (tmp_path / "sl/checkpoints.jsonl").read_text().splitlines()]
        assert [record["name"] for record in records] == ["000004", "final"]
        (tmp_path / "sl/checkpoints.jsonl").write_text(json.dumps(records[0]) + "\n")  # as if it was killed behind step 4
        await trio.to_thread.run_sync(start, [*recipe, *settings, "max_steps=10"], server.url, tmp_path)
    losses = [line["train_mean_nll"] for line in half]
    rest = [line["train_mean_nll"] for line in read_metrics(tmp_path / "sl")[len(half) :]]
    assert losses[0] > math.log(len(tokenizer)) - 0.5  # a model that knows nothing
    assert rest[:2] == losses[4:]  # steps 4 and 5 again, from the checkpoint, bit for bit
    assert rest[-1] < losses[0] - 0.5


@pytest.mark.slow
@needs.TINKER
async def test_the_rl_recipe_of_the_cookbook_learns(tmp_path):
    from rollouts.models.loading import load_hf_model, load_tokenizer

    write_world(tmp_path)
    model, tokenizer = load_hf_model(tmp_path / MODEL), load_tokenizer(tmp_path / MODEL)
    recipe = ["-m", "tinker_cookbook.recipes.rl_loop", f"model_name={MODEL}", f"log_path={tmp_path / 'rl'}", "loss_fn=importance_sampling"]
    settings = ["batch_size=4", "group_size=32", "lora_rank=8", "learning_rate=0.03", "max_tokens=4", "max_steps=8", "save_every=4"]
    async with open_tinker_server(model, tokenizer, model_name=MODEL, directory=tmp_path / "saved") as server:
        await trio.to_thread.run_sync(start, [*recipe, *settings], server.url, tmp_path)
    rewards = [line["reward/total"] for line in read_metrics(tmp_path / "rl")]
    assert rewards[0] < 0.2, rewards  # one token of many
    assert min(rewards[-3:]) > 0.8, rewards
