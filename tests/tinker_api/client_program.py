"""A program of the real tinker client: every verb that the server has, and what it refuses. Run by another Python, which has `tinker`.

python client_program.py URL    prints one JSON object of what came back
"""

import json
import sys

import tinker
from tinker import types

TOKENS = [5, 6, 7, 8, 9, 10]
WEIGHTS = [1.0, 1.0, 0.0, 2.0, -0.5]
ADAM = types.AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8)


def make_datum(tokens=TOKENS, **inputs):
    """Tokens shifted by one, with the arrays of a loss."""
    prompt = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


def list_pass(result):
    """The result of a pass as JSON."""
    return {"metrics": result.metrics, "logprobs": [out["logprobs"].tolist() for out in result.loss_fn_outputs]}


def note_error(make):
    """The error of a call, as text."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(url):
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    training = service.create_lora_training_client(base_model="policy", rank=4, seed=3).result()
    info = training.get_info()
    data = [make_datum(weights=WEIGHTS), make_datum(TOKENS[:3], weights=[1.0, 1.0])]
    first = training.forward_backward(data, "cross_entropy")  # submitted with the update, as recipes do
    update = training.optim_step(ADAM)
    told = {"info": info.model_dump(), "cross_entropy": list_pass(first.result()), "update": update.result().metrics}
    shifted = types.Datum(  # targets that are no shifted input, as of a prompt whose targets are left out
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": [0, 0, 8, 9, 10],
            "logprobs": [0.0, 0.0, -4.0, -4.5, -5.0],
            "advantages": [0.0, 0.0, 1.0, -1.0, 2.0],
        },
    )
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        told[loss] = list_pass(training.forward([shifted], loss).result())
    training.forward_backward([shifted], "ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}).result()
    training.optim_step(ADAM).result()
    told["state"] = training.save_state("one").result().path
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TOKENS[:3])
    params = types.SamplingParams(max_tokens=4, temperature=0.7, top_k=20, top_p=0.9, seed=11)
    drawn = sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result()
    told["samples"] = [{"tokens": one.tokens, "logprobs": one.logprobs, "stop_reason": one.stop_reason} for one in drawn.sequences]
    told["ids"] = [one.sequence_id for one in drawn.sequences]
    told["prompt_logprobs"] = drawn.prompt_logprobs
    told["scores"] = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    told["last_scores"] = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS), prompt_logprobs_last_n=2).result()
    told["after"] = list_pass(training.forward(data, "cross_entropy").result())
    path = training.save_weights_for_sampler("two").result().path
    named = service.create_sampling_client(model_path=path).result()
    told["named_scores"] = named.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    base = service.create_sampling_client(base_model="policy").result()
    told["base_scores"] = base.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    told["custom"] = training.forward_backward_custom(data, lambda _, logprobs: (sum(one.sum() for one in logprobs), {})).result().metrics
    again = service.create_training_client_from_state_with_optimizer(told["state"]).result()
    told["restored"] = list_pass(again.forward(data, "cross_entropy").result())
    told["restored_info"] = again.get_info().model_dump()
    told["refused"] = {
        "stable_reinforce": note_error(lambda: training.forward([shifted], "stable_reinforce").result()),
        "two targets": note_error(lambda: training.forward([make_datum(weights=WEIGHTS), make_two_targets()], "cross_entropy").result()),
        "outside": note_error(lambda: training.forward([make_datum([5, 6, 9999], weights=[1.0, 1.0])], "cross_entropy").result()),
        "topk": note_error(lambda: sampler.sample(prompt, 1, params, topk_prompt_logprobs=2).result()),
        "other model": note_error(lambda: service.create_sampling_client(base_model="Qwen/Qwen3-8B").result()),
        "path": note_error(lambda: service.create_sampling_client(model_path="tinker://../weights/one").result()),
        "name": note_error(lambda: service.create_lora_training_client(base_model="policy").result().save_state("../x").result()),
    }
    service.close("success").result()
    print(json.dumps(told))


def make_two_targets():
    """A datum with two targets for each position, as distillation of a teacher's top tokens sends them."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:2]),
        loss_fn_inputs={"target_tokens": [[6, 7], [7, 8]], "weights": [[0.5, 0.5], [0.5, 0.5]]},
    )


if __name__ == "__main__":
    main(sys.argv[1])
