"""Train an agent of the openai client, unchanged: it answers 37*12+5= with a calculator as its tool. pip install 'rollouts-rl[agents]'.

    python examples/openai_agent.py
    python examples/openai_agent.py --model.hidden-size 128 --engine.kind vllm --engine.launch --engine.python ~/envs/vllm/bin/python

The model begins with random weights, learns the form of a call from demonstrations, and then, from the rewards of the agent's runs, to
call the tool and to trust its results. The accuracy on problems that it has not seen is printed before and after. About two minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import httpx
import openai

from integration.train import main as train
from rollouts import AgentTask
from rollouts.environments.games.calculator import calculate

# -- the agent: any program of the openai client; it knows nothing of training

SCHEMA = {"type": "object", "properties": {"e": {"type": "string", "description": "one operation, such as 12*7"}}, "required": ["e"]}
TOOLS: Any = [{"type": "function", "function": {"name": "calc", "description": "Compute.", "parameters": SCHEMA}}]
MAX_TURNS = 5


def use_calculator(arguments: str) -> str:
    """Return the result of a call, or what is wrong with it."""
    try:
        return calculate(str(json.loads(arguments)["e"]), max_operations=1)
    except (ValueError, KeyError, ZeroDivisionError) as error:
        return f"error: {error}"


async def solve(client: openai.AsyncOpenAI, question: str) -> str:
    """Ask the model until it answers without a call.

    The first call that fails is shown to the model once, for another try, and is left out of the history from then on, which stays short.
    """
    messages: list[Any] = [{"role": "user", "content": question}]
    failed: list[Any] = []  # the exchange that failed, as long as it is shown
    may_retry = True
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="any", messages=[*messages, *failed], tools=TOOLS, temperature=0)
        reply = answer.choices[0].message
        if not reply.tool_calls:
            return (reply.content or "").strip()
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": use_calculator(call.function.arguments)}
            for call in reply.tool_calls
            if call.type == "function"
        ]
        has_failed = any(result["content"].startswith("error") for result in results)
        if has_failed and may_retry:
            failed, may_retry = [reply, *results], False
        else:
            messages, failed = [*messages, reply, *results], []
    return ""


# -- its run as a rollout: where the model is, and what the answer is worth


async def play(task: AgentTask) -> float:
    """Let the agent solve a problem. Returns 1 for the right answer, else 0."""
    # plain HTTP on loopback: there are no certificates to check, and no proxy to ask
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=60) as http:
        client = openai.AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key, http_client=http, max_retries=0)
        return float(await solve(client, str(task.prompt.content)) == task.prompt.metadata["ground_truth"])


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the agent's runs as rollouts; further arguments are options of `rollouts train`."""
    return train(["--task", "calculator", "--agent.function", f"{__file__}:play", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
