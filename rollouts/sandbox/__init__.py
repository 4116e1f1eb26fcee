"""Processes for code that nobody trusts: reward code of users, programs that a model wrote.

limits        SandboxLimits, and the values that come back
confinement   the levels: bubblewrap, namespaces with Landlock, plain; find_confinement
run           run_confined: one program, from start to end
pool          SandboxPool: warm workers that call one function, milliseconds a call
reward_code   execute_user_reward_code, execute_code: source text that comes with each call

launch starts a sandbox. Inside run init (the trusted first process), mounts (its file system), worker and source_code (calls of a pool),
processes, messages, kernel and landlock. These import the standard library only.
"""
