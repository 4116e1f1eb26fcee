"""Generate requests with vLLM whenever a line arrives: a contender of benchmarks.run, for the Python of an environment with vLLM.

    VLLM_PYTHON benchmarks/vllm_worker.py FOLDER

FOLDER holds the model and requests.json. Prints "ready", then the number of tokens after each line of input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # everything in this process, whose processor seconds are read
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(folder: Path) -> None:
    """Load the model; for each line, which is a number, generate the samples of so many prompts."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    requests: Any = json.loads((folder / "requests.json").read_text())
    engine = LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=256, enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": tokens} for tokens in requests["prompts"] for _ in range(requests["samples"])]
    params = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False) for length in requests["lengths"]
    ]
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        number = int(line) * requests["samples"]
        outputs = engine.generate(prompts[:number], params[:number], use_tqdm=False)
        engine.reset_prefix_cache()  # as after a weight update
        print(sum(len(output.outputs[0].token_ids) for output in outputs), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
