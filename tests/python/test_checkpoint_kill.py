# SPDX-License-Identifier: MIT
"""Trainings that are killed at random moments, alone and in ranks: what latest() names is whole."""
import os
import textwrap

import pytest

from support import python

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


# ------------------------------------------------------------------------------------- in ranks --

# Forked as above. main(rank, ckpt) is what each does; what it says comes in the order of ranks.
RANKS = """
    import os, random, signal, sys, time, traceback, torch
    import torch.distributed as dist
    import penstock
    from penstock import Checkpointer

    folder, SIZE = sys.argv[1], 3
    torch.set_num_threads(1)
    turns = 0

    def state_of(rank, step):
        return {"t": torch.full((1 << 17,), 10 * step + rank), "step": step}

    def rank_process(rank, size, store, main, out):
        os.dup2(out, 1)
        try:
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
            ckpt = Checkpointer(folder, keep=2, timeout=60)
            main(rank, ckpt)
            ckpt.close()
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def begin(main, size=SIZE):
        global turns
        turns += 1
        started = []
        for rank in range(size):
            told, tell = os.pipe()
            pid = os.fork()
            if not pid:
                rank_process(rank, size, f"{folder}.store{turns}", main, tell)
            os.close(tell)
            started.append((pid, told))
        return started

    def end(started):
        said = []
        for pid, told in started:
            with os.fdopen(told) as file:
                said.append(file.read().strip())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code == 0, f"exit {code}: {said}"
        return said

    def attempt(call):
        try:
            call()
            print("-", end="; ")
        except BaseException as error:      # Ctrl-C, too
            print(f"{type(error).__name__} {error}", end="; ")
"""


def in_ranks(code: str, folder, timeout: float = 100) -> str:
    done = python(textwrap.dedent(RANKS) + textwrap.dedent(code), folder, timeout=timeout,
                  check=False)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_each_rank_has_its_file_and_all_hear_of_the_commit(tmp_path):
    said = in_ranks("""
        def main(rank, ckpt):
            for step in 1, 2, 3:
                report = ckpt.save(step, state_of(rank, step), user={"of": rank})
            ckpt.wait()
            state = state_of(rank, 0)
            ckpt.restore(into=state)
            assert (state["t"] == 30 + rank).all() and state["step"] == 3
            assert ckpt._ranks.on_this_host == SIZE
            print(ckpt.steps(), report.done, ckpt.show()["user"])

        for line in end(begin(main)):
            print(line)

        def other(rank, ckpt):
            try:
                ckpt.restore()
            except ValueError as error:
                print(error)

        print(end(begin(other, 2))[1])
    """, tmp_path / "ckpt").splitlines()
    assert said[:3] == ["[2, 3] True {'of': 0}"] * 3
    assert "it was saved by 3 ranks, and there are 2" in said[3]
    assert sorted(os.listdir(tmp_path / "ckpt/step-00000003")) == [
        "manifest.json", "rank-00000.pt", "rank-00001.pt", "rank-00002.pt"]


def test_what_fails_on_one_rank_fails_on_all_and_they_go_on(tmp_path):
    said = in_ranks("""
        import threading

        def main(rank, ckpt):
            attempt(lambda: ckpt.save(1, threading.Lock() if rank == 1 else {}))
            attempt(lambda: ckpt.save(2 if rank == 1 else 3, {}))
            real = Checkpointer._store
            def fails(self, save):
                raise OSError("no more")
            if rank == 1:
                Checkpointer._store = fails
            ckpt.save(4, state_of(rank, 4))
            attempt(ckpt.wait)
            Checkpointer._store = real
            dist.barrier()      # rank 0 has removed what there was
            assert ckpt.steps() == [] and not os.path.exists(ckpt.path(4)), os.listdir(folder)
            ckpt.save(5, state_of(rank, 5))
            ckpt.wait()
            print(ckpt.steps())

        for line in end(begin(main)):
            print(line)
    """, tmp_path / "ckpt").splitlines()
    assert said[0] == said[2] and "rank 1 cannot: TypeError" in said[0]
    assert "rank 1 saves step 2" in said[0] and "rank 0 saves step 3" in said[1]
    assert "rank 1 failed: OSError: no more" in said[0] and "; OSError no more; [5]" in said[1]


def test_ranks_that_hear_of_a_failure_at_different_calls_do_not_wait_for_each_other(tmp_path):
    """One has it raised by the save() that fails, or asks by wait(); the others by the next."""
    said = in_ranks("""
        def fails(self, *rest):
            raise OSError("no more")

        def main(rank, ckpt):
            for step, name in (1, "_gather"), (3, "_store"):
                real = getattr(Checkpointer, name)
                if rank == 0:
                    setattr(Checkpointer, name, fails)
                attempt(lambda: ckpt.save(step, state_of(rank, step)))
                if rank == 0:
                    attempt(ckpt.wait)
                setattr(Checkpointer, name, real)
                attempt(lambda: ckpt.save(step + 1, state_of(rank, step + 1)))
                dist.barrier()
            # The same where a rank is alone in what it asks for.
            for step in 5, 6, 5, 6, 7:
                attempt(lambda: ckpt.save(step, state_of(rank, step), overwrite=rank == 0))
            ckpt.wait()
            print(ckpt.steps())

        for line in end(begin(main)):
            print(line)
    """, tmp_path / "ckpt").splitlines()
    old = "; Error cannot save step {}: rank 0 failed: OSError: no more"
    for rank, line in enumerate(said):
        *calls, steps = line.split("; ")
        assert steps == "[6, 7]" and calls[-1] == "-", line
        if rank:
            assert calls[:4] == ["-", old.format(1)[2:], "-", old.format(3)[2:]], line
            assert calls[4:6] == ["-", "-"] and "step 5 exists" in calls[6], line
        else:
            assert calls[:2] == ["OSError no more", "-"] and calls[3:5] == ["-", "OSError no more"]
            assert calls[2].startswith("Error cannot save step 2: rank 1 cannot: step 1 has "), line


def test_what_one_rank_cannot_use_and_steps_that_cannot_go_are_heard_by_all(tmp_path):
    said = in_ranks("""
        class Stuck:
            def __init__(self, folder):
                self.folder = folder
            def __getattr__(self, name):
                return getattr(self.folder, name)
            def gc(self, keep):
                raise OSError("it stays")

        def main(rank, ckpt):
            attempt(lambda: ckpt.save(-1 if rank == 1 else 1, {}))
            attempt(lambda: ckpt.save(1, {}, user={"a": {1}} if rank == 1 else None))
            real = ckpt._folder
            if rank == 0:
                ckpt._folder = Stuck(real)
            report = ckpt.save(1, state_of(rank, 1))
            attempt(ckpt.wait)
            ckpt._folder = real
            for step in 2, 3:
                last = ckpt.save(step, state_of(rank, step))
            ckpt.wait()
            print(report.done, last.removed, ckpt.steps())

        for line in end(begin(main)):
            print(line)
    """, tmp_path / "ckpt").splitlines()
    assert said[0].startswith("Error cannot save step 1: rank 1 cannot: cannot use step: -1")
    assert said[1].startswith("Error cannot use step: -1")
    assert all("cannot use user" in line and "it stays" in line for line in said)
    assert all(line.endswith("; True [1] [2, 3]") for line in said)


def test_a_rank_that_cannot_put_its_state_in_place_is_heard_of_by_all(tmp_path):
    said = in_ranks("""
        class Picky:
            def state_dict(self):
                return {}
            def load_state_dict(self, state):
                raise LookupError("not mine")

        class Fine(Picky):
            def load_state_dict(self, state):
                pass

        class Stopped(Picky):
            def load_state_dict(self, state):
                raise KeyboardInterrupt

        def main(rank, ckpt):
            ckpt.save(1, {"o": Fine()})
            for kind in Picky, Stopped:
                attempt(lambda: ckpt.restore(into={"o": kind() if rank == 1 else Fine()}))
                assert not ckpt.report().done
            def stopped(step, fallback):
                raise KeyboardInterrupt
            if rank == 0:
                ckpt._candidates = stopped
            attempt(ckpt.restore)
            if rank == 0:
                del ckpt._candidates
            ckpt.restore(into={"o": Fine()})
            print(ckpt.report().done)

        for line in end(begin(main)):
            print(line)
    """, tmp_path / "ckpt").splitlines()
    told = "Error cannot restore step 1: rank 1 failed: "
    heard = f"{told}LookupError: not mine; {told}KeyboardInterrupt: ; "
    first = "Error cannot go on without rank 0: KeyboardInterrupt: ; True"
    assert said == [f"{heard}KeyboardInterrupt ; True",
                    f"LookupError not mine; KeyboardInterrupt ; {first}", heard + first]


def test_ctrl_c_on_one_rank_while_it_pickles_is_heard_of_by_all(tmp_path):
    said = in_ranks("""
        import signal

        class Slow:
            def __reduce__(self):
                signal.raise_signal(signal.SIGINT)
                return Slow, ()

        def main(rank, ckpt):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                ckpt.save(1, Slow() if rank == 1 else {})
            except BaseException as error:
                print(f"{type(error).__name__} {error}", end="; ")
            ckpt.wait()
            ckpt.save(2, state_of(rank, 2))
            ckpt.wait()
            print(ckpt.steps())

        for line in end(begin(main)):
            print(line)
    """, tmp_path / "ckpt").splitlines()
    assert said[0] == said[2] == ("Error cannot save step 1: rank 1 cannot: KeyboardInterrupt: ; "
                                  "[2]")
    assert said[1] == "KeyboardInterrupt ; [2]"


def test_groups_that_are_none_are_refused_in_words(tmp_path):
    said = in_ranks("""
        def refused(group):
            try:
                Checkpointer(folder, process_group=group)
            except ValueError as error:
                print(error)

        refused("x")

        def main(rank, ckpt):
            refused("x")
            some = dist.new_group([0])
            if rank:
                refused(some)

        print(*end(begin(main, 2)), sep="\\n")
    """, tmp_path / "ckpt").splitlines()
    assert [line.partition("process_group: ")[2].partition(", or leave")[0] for line in said] == [
        "torch.distributed is not in use. Call torch.distributed.init_process_group() first",
        *["'x' is no group of torch.distributed. Give what torch.distributed.new_group() has "
          "returned"] * 2,
        "this rank is not in that group. Make the Checkpointer on the ranks of the group alone"]


def test_all_ranks_take_the_step_before_where_the_file_of_one_is_damaged(tmp_path):
    said = in_ranks("""
        import warnings

        def main(rank, ckpt):
            for step in 1, 2:
                ckpt.save(step, state_of(rank, step))
            ckpt.wait()
            if rank == 2:
                with open(ckpt.path(2) + "/rank-00002.pt", "r+b") as file:
                    file.seek(20_000)
                    file.write(b"x")
            dist.barrier()
            try:
                ckpt.restore()
            except penstock.Error as error:
                print(str(error)[:70], end="; ")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = ckpt.restore(fallback=True)
            assert (found["t"] == 10 + rank).all()
            print([str(each.message)[:20] for each in caught], ckpt.report().step)

        for line in end(begin(main)):
            print(line)
    """, tmp_path / "ckpt").splitlines()
    assert all(line.endswith("['step 1 is taken, sin'] 1") for line in said)
    assert said[0].startswith("cannot restore step 2: rank 2 failed: cannot verify") \
        and said[2].startswith("cannot verify")


def test_ranks_that_restore_different_steps_are_told_so(tmp_path):
    said = in_ranks("""
        def main(rank, ckpt):
            for step in 1, 2:
                ckpt.save(step, state_of(rank, step))
            ckpt.wait()
            for step in [1 if rank else 2, 1 if rank == 2 else None, "x" if rank == 1 else 1]:
                try:
                    ckpt.restore(step)
                    print("restored", end="; ")
                except (penstock.Error, TypeError) as error:
                    print(error, end="; ")
            print((ckpt.restore(1, fallback=True)["t"] == 10 + rank).all())

        for line in end(begin(main)):
            print(line)
    """, tmp_path / "ckpt").splitlines()
    hint = ". All ranks restore with the same arguments; "
    last = f"cannot restore the last step: rank 2 restores step 1{hint}"
    wrong = "cannot restore step 1: rank 1 cannot: "
    assert len(said) == 3 and not any("restored" in line for line in said)
    assert said[0].startswith(f"cannot restore step 2: rank 1 restores step 1{hint}{last}{wrong}")
    assert said[1].startswith(f"cannot restore step 1: rank 0 restores step 2{hint}{last}")
    assert wrong not in said[1] and "tensor(True)" in said[1]
    assert f"cannot restore step 1: rank 0 restores the last step{hint}{wrong}" in said[2]


def test_some_of_the_ranks_and_one_that_does_not_come_in_time(tmp_path):
    said = in_ranks("""
        def main(rank, ckpt):
            some = dist.new_group([0, 2])
            for turn in range(2 if rank != 1 else 0):
                with Checkpointer(folder + ".some", process_group=some, timeout=60) as other:
                    other.save(turn, state_of(rank, turn))
                    other.wait()
                    assert (other.restore()["t"] == 10 * turn + rank).all()
                    print(other.show()["world_size"], end=" ")
            dist.barrier()
            with Checkpointer(folder + ".late", timeout=1) as late:
                if rank < 2:
                    try:
                        late.save(1, {})
                    except penstock.Error as error:
                        print(str(error)[:70])
                    try:
                        late.save(2, {})
                    except penstock.Error as error:
                        print(str(error)[:70])
                dist.barrier()

        for lines in end(begin(main)):
            print(lines)
    """, tmp_path / "ckpt").splitlines()
    lost = ["cannot agree with the other ranks: one of them has ended, or did not c",
            "cannot agree with the other ranks: they were lost before: "]
    assert said[0] == "2 2 " + lost[0] and said[2] == lost[0] and said[4] == "2 2"
    assert said[1].startswith(lost[1]) and said[3].startswith(lost[1])


def test_a_checkpointer_that_not_all_ranks_make_says_what_they_must_do(tmp_path):
    said = in_ranks("""
        def main(rank, ckpt):
            if rank == 0:
                attempt(lambda: Checkpointer(folder + ".one", timeout=1))
            dist.barrier()
            sys.stdout.flush()
            os._exit(0)         # close() is for who has made the same ones

        print(end(begin(main, 2))[0])
    """, tmp_path / "ckpt")
    assert said.startswith("Error cannot agree with the other ranks: one of them has ended, or did "
                           "not come in time: ")
    assert said.endswith(". All ranks make the Checkpointer, with the same arguments; "
                         "process_group= names some;\n")


def test_a_group_that_ends_before_the_save_is_told_as_that_and_no_step_is_called_lost(tmp_path):
    """By rank 1, that cannot know what rank 0 has done since."""
    said = in_ranks("""
        def main(rank, ckpt):
            real = ckpt._settle
            def late(save, described):
                if rank == 1:
                    gather = ckpt._ranks.gather
                    def last(mine):
                        found = gather(mine)
                        dist.destroy_process_group()
                        return found
                    ckpt._ranks.gather = last
                real(save, described)
            ckpt._settle = late
            ckpt.save(1, state_of(rank, 1))
            ckpt._wait()
            if rank == 1:
                sys.stderr = sys.stdout
                penstock._checkpointer._tell()
                print(ckpt.steps())
            os._exit(0) if not rank else attempt(ckpt.wait)

        print(end(begin(main, 2))[1])
    """, tmp_path / "ckpt")
    why = ("cannot agree with the other ranks: torch.distributed was ended before the save was. "
           "Call close() before torch.distributed.destroy_process_group()")
    assert said == (f"penstock: step 1 is saved only if 'penstock ckpt list' names it: {why}\n"
                    f"[1]\nError {why};\n")


@pytest.mark.slow
def test_ranks_that_are_killed_one_by_one_leave_the_last_step_whole(tmp_path):
    """The others are told, and do not wait for ever; all of them go on from the same step."""
    said = in_ranks("""
        def main(rank, ckpt):
            step = ckpt.latest() or 0
            if step:
                state = state_of(rank, 0)
                ckpt.restore(into=state)
                assert (state["t"] == 10 * step + rank).all() and state["step"] == step
            print(step, flush=True)
            try:
                while True:
                    step += 1
                    ckpt.save(step, state_of(rank, step))
            except penstock.Error as error:
                assert "the other ranks" in str(error) or "rank " in str(error), error
            try:
                ckpt.wait()
            except penstock.Error:
                pass
            os._exit(0)

        last = 0
        for turn in range(9):
            started = begin(main)
            files = [os.fdopen(told) for _, told in started]
            steps = {int(file.readline()) for file in files}
            assert len(steps) == 1 and min(steps) >= last, (steps, last)
            last = min(steps)
            time.sleep(random.random() * 0.2)
            victim = started[turn % SIZE][0]
            os.kill(victim, signal.SIGKILL)
            for pid, _ in started:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                assert code == (-signal.SIGKILL if pid == victim else 0), code
            with Checkpointer(folder, read_only=True) as ckpt:
                if ckpt.latest() is not None:
                    assert len(ckpt.show()["files"]) == ckpt.verify()["files"] == SIZE
        print(last)
    """, tmp_path / "ckpt")
    assert int(said) > 0
