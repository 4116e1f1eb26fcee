"""The sandbox of a normal user, where the tests run as root: user namespaces without any privilege outside."""

from __future__ import annotations

import subprocess

import needs

PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import os, trio
from rollouts.errors import SandboxError
from rollouts.sandbox import confinement, limits, run

FORKS = '''
import os, time
try:
    for count in range(100):
        if os.fork() == 0: time.sleep(1000)
except OSError: pass
print(count)
'''

async def main():
    assert os.getuid() == 65534
    for level in (confinement.bubblewrap(), confinement.namespaces(), confinement.plain()):
        try:
            run.try_confinement(level)
        except SandboxError as error:
            print("skipped:", error)
            continue
        result = await run.run_confined("import sys; print(sys.stdin.read())", stdin=b"hello", confinement=level)
        assert (result.ok, result.stdout) == (True, b"hello\\n"), result
        if level.isolated:
            few = limits.SandboxLimits(wall_s=30.0, num_processes=10)
            result = await run.run_confined(FORKS, confinement=level, limits=few)
            assert result.failure == limits.SandboxFailure.PROCESSES or int(result.stdout) < 16, result
        print("held:", level.name)
trio.run(main)
"""


@needs.another_user()
def test_a_user_without_privileges_has_the_same_levels():
    done = subprocess.run([*needs.AS_NOBODY, PROGRAM, *needs.import_path()], capture_output=True, text=True, timeout=110, env={})
    assert done.returncode == 0, done
    assert "held: plain" in done.stdout, done
