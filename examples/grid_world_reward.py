"""A third party's reward function: gigpo_grid_world.py runs it in a sandbox, so it imports only the standard library.

It sees only the conversation: the observations ("12>33": at column 1, row 2, the goal at 3, 3) and the model's answers.
"""


def reward(messages, **_):
    """Return reward 1 for an episode that reaches the goal, and as rewards of steps 1 for the step that arrives."""
    seen = [message["content"] for message in messages if message["role"] != "assistant"]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    arrived = [cells.split(">")[0] == cells.split(">")[1] for cells in seen[1:]]
    steps = [{"step_index": k, "base_reward": float(arrived[k])} for k in range(len(answers))]
    moves = sum(answer.strip() in ("u", "d", "l", "r") for answer in answers)
    return {"score": float(any(arrived)), "step_outputs": steps, "metrics": {"moves": {"score": moves / len(answers)}}}
