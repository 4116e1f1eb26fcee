"""Sandboxed processes for untrusted code: users' reward code, programs that a model wrote.

limits        SandboxLimits, and the values that a sandbox returns
confinement   the levels: bubblewrap, namespaces with Landlock, plain; find_confinement
run           run_confined: one program, from start to end
pool          SandboxPool: warm workers that call one function, milliseconds a call
reward_code   execute_user_reward_code, execute_code: source text sent with each call

launch starts a sandbox. These run inside: init (the trusted first process), mounts (its file system), worker and source_code (calls of a
pool), processes, messages, kernel and landlock. They import the standard library only.
"""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
