"""Stand-ins for tests of your own rewards, environments, engines and loops: no model, no GPU, and time that can be virtual.

FakeEngine is an InferenceEngine (and InMemoryWeightUpdates) that answers from a script; FakeBackend is a TrainingBackend (and
CheckpointingBackend) that trains nothing; FakeWeightChannel a WeightChannel between the two; create_tiny_model is a real Hugging Face
model, randomly initialised and very small.

Delays are trio sleeps, so under the autojump clock of pytest-trio a test of seconds takes microseconds and is exact:

    async def test_two_requests_overlap(autojump_clock):
        engine = FakeEngine(script_answer([5, 6, 1]), seconds_per_token=1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, (3,), SamplingParams())
            nursery.start_soon(engine.generate, (4,), SamplingParams())
        assert trio.current_time() == 3.0

FakeSGLangServer and FakeVLLMServer are whole servers on a loopback socket (docs/testing.md), started with the options of SGLangSettings and
VLLMSettings; their module is rollouts.testing.servers.

Both FakeEngine and FakeBackend record their calls in `calls`. Pass them the same list to see the order of calls between them.
"""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
