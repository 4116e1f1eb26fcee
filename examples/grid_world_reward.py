"""A reward function that is somebody else's: gigpo_grid_world.py runs it in a sandbox, so it imports the standard library only.

It sees the conversation and nothing else: what the model was shown ("12>33": at column 1, row 2, the goal at 3, 3) and what it answered.
"""


def reward(messages, **_):
    """1 for an episode that comes to the goal; each step says what it earned by itself: 1 for the one that arrives."""
    seen = [message["content"] for message in messages if message["role"] != "assistant"]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    arrived = [cells.split(">")[0] == cells.split(">")[1] for cells in seen[1:]]
    steps = [{"step_index": k, "base_reward": float(arrived[k])} for k in range(len(answers))]
    moves = sum(answer.strip() in ("u", "d", "l", "r") for answer in answers)
    return {"score": float(any(arrived)), "step_outputs": steps, "metrics": {"moves": {"score": moves / len(answers)}}}
