# SPDX-License-Identifier: MIT
"""Trainings that are killed at random moments, alone and in ranks: what latest() names is whole."""
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from penstock import Checkpointer
from support import environment, python

# One process imports torch and forks the trainings, so that a kill costs milliseconds. Each of them
# goes on from the last step; what it finds must be what was saved as that step.
KILLED = """
    import os, random, signal, sys, time, torch
    from penstock import Checkpointer

    folder, rounds = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)

    def state_of(step):
        return {"large": torch.full((1 << 19,), step), "small": [torch.full((9,), float(step))],
                "step": step}

    def check(ckpt):
        latest = ckpt.latest()
        if latest is None:
            return 0
        found = ckpt.restore()
        assert ckpt.report().step == latest == found["step"], (latest, found["step"])
        assert (found["large"] == latest).all() and (found["small"][0] == latest).all()
        ckpt.verify()
        return latest

    def train():
        ckpt = Checkpointer(folder, keep=2)
        step = check(ckpt)
        for name in os.listdir(folder):
            assert name == ".penstock.lock" or int(name[5:]) in ckpt.steps(), name
        os.write(1, b".")
        while True:
            # Now and then the same step again, which then has two sets of files.
            again = step > 0 and step % 3 == 0
            if again:
                ckpt.save(step, state_of(step), overwrite=True)
            step += 1
            ckpt.save(step, state_of(step))

    reached = []
    for turn in range(rounds):
        told, tell = os.pipe()
        pid = os.fork()
        if not pid:
            os.dup2(tell, 1)
            try:
                train()
            except BaseException as error:
                os.write(2, repr(error).encode() + b"\\n")
            os._exit(1)
        os.close(tell)
        assert os.read(told, 1) == b".", "a training could not go on"
        os.close(told)
        time.sleep(random.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        with Checkpointer(folder, read_only=True) as ckpt:
            reached.append(check(ckpt))
    assert reached == sorted(reached), reached
    print(reached[-1])
"""


@pytest.mark.slow
def test_the_last_step_of_a_killed_training_is_always_whole(tmp_path):
    assert int(python(KILLED, tmp_path, 40, timeout=120).stdout) > 0
