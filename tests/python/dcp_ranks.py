# SPDX-License-Identifier: MIT
"""Several ranks on one machine: a program that forks them, for test_dcp.py.

    dcp_ranks.py SCENARIO FOLDER

The ranks speak gloo. torch is imported once, before the fork, since that takes longest; where it
sees a GPU, that starts the driver, which a fork does not survive. So no GPU is seen.
"""
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock import dcp as ours

warnings.simplefilter("ignore")
torch.set_num_threads(1)
folder = sys.argv[2]


def fork(world, function, *args):
    """The ranks' process ids; each runs function(rank, world, *args) and ends with 0 or 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if pid:
            ranks.append(pid)
            continue
        status = 1
        try:
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
            function(rank, world, *args)
            dist.barrier()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return ranks


def run(world, function, *args):
    """All of them, to a good end."""
    for pid in fork(world, function, *args):
        assert os.waitpid(pid, 0)[1] == 0, function.__name__


# ------------------------------------------------------------------------------------ DTensors --

PLACES = {"rows": [Shard(0)], "columns": [Shard(1)], "all": [Replicate()], "odd": [Shard(0)],
          "wide": [Shard(1)]}


def full_state():
    torch.manual_seed(0)
    return {"rows": torch.randn(64, 96), "columns": torch.randn(48, 40),
            "all": torch.randn(3000), "odd": torch.randn(7, 1000).to(torch.bfloat16),
            "wide": torch.randn(6, 24000)}


def sharded(world, values):
    mesh = init_device_mesh("cpu", (world,))
    state = {name: distribute_tensor(value, mesh, PLACES[name]) for name, value in values.items()}
    return {"tensors": state, "note": {"steps": [1, 2, "three"]}}


def save(rank, world, path, writer):
    dcp.save(sharded(world, full_state()), storage_writer=writer(path))


def load(rank, world, path, reader):
    want = full_state()
    state = sharded(world, {name: torch.zeros_like(value) for name, value in want.items()})
    state["note"] = {"steps": [0, 0, 0]}
    dcp.load(state, storage_reader=reader(path))
    assert state["note"] == {"steps": [1, 2, "three"]}, state["note"]
    for name, value in want.items():
        got = state["tensors"][name]
        assert isinstance(got, DTensor) and torch.equal(got.full_tensor(), value), name


def two(rank, world):
    save(rank, world, f"{folder}/two", ours.Writer)
    save(rank, world, f"{folder}/torch", dcp.FileSystemWriter)


def three(rank, world):
    load(rank, world, f"{folder}/two", ours.Reader)
    load(rank, world, f"{folder}/two", dcp.FileSystemReader)
    load(rank, world, f"{folder}/torch", ours.Reader)
    save(rank, world, f"{folder}/three", ours.Writer)


def one(rank, world):
    load(rank, world, f"{folder}/three", ours.Reader)
    load(rank, world, f"{folder}/three", dcp.FileSystemReader)


def reshard():
    """2 ranks save, 3 load and save again, 1 loads; with torch's own classes as well."""
    run(2, two)
    run(3, three)
    run(1, one)


# --------------------------------------------------------------------------------------- FSDP2 --

def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(50, 130), torch.nn.ReLU(), torch.nn.Linear(130, 30))


def trained(world, seed):
    """A model in shards and its optimizer, which has state."""
    net = model(seed)
    if world:
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.manual_seed(seed)
    net(torch.randn(8, 50)).sum().backward()
    adam.step()
    return net, adam


def fsdp_save(rank, world, path):
    net, adam = trained(world, 1)
    weights, moments = states.get_state_dict(net, adam)
    writer = ours.Writer(path)
    future = dcp.async_save({"net": weights, "adam": moments}, storage_writer=writer)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()       # what training does next must not be seen
    future.result()


def fsdp_load(rank, world, path):
    want, _ = trained(0, 1)
    net, adam = trained(world, 2)
    weights, moments = states.get_state_dict(net, adam)
    state = {"net": weights, "adam": moments}
    dcp.load(state, storage_reader=ours.Reader(path))
    states.set_state_dict(net, adam, model_state_dict=state["net"],
                          optim_state_dict=state["adam"])
    for (name, got), value in zip(net.named_parameters(), want.parameters()):
        got = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(got, value, msg=name)


def fsdp():
    run(2, fsdp_save, f"{folder}/fsdp")
    run(3, fsdp_load, f"{folder}/fsdp")
    run(1, fsdp_load, f"{folder}/fsdp")


# ---------------------------------------------------------------------------------------- kill --

def state_of(value):
    tensors = {str(i): torch.full((200, 300), float(value)) for i in range(4)}
    return {"value": value, **{name: distribute_tensor(tensor, init_device_mesh(
        "cpu", (dist.get_world_size(),)), [Shard(0)]) for name, tensor in tensors.items()}}


class Dying(ours.Writer):
    """A Writer whose process is killed at a moment of its save."""

    moment = None

    def die(self, moment):
        if moment == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def prepare_local_plan(self, plan):
        self.die("planning")
        return super().prepare_local_plan(plan)

    def write_data(self, plan, planner):
        self.die("before its file")
        result = super().write_data(plan, planner)
        self.die("after its file")
        return result

    def finish(self, metadata, results):
        self.die("before .metadata")
        super().finish(metadata, results)
        self.die("after .metadata")


def save_value(rank, world, path, value, victim=None, moment=None):
    writer = Dying(path)
    writer.moment = moment if rank == victim else None
    dcp.save(state_of(value), storage_writer=writer)


def kill_after(ranks, victim, seconds):
    """Kill one of them, then the others, which may wait for it for ever."""
    if seconds is None:
        os.waitpid(ranks[victim], 0)
    else:
        time.sleep(seconds)
        os.kill(ranks[victim], signal.SIGKILL)
        os.waitpid(ranks[victim], 0)
    time.sleep(0.05)
    for pid in ranks:
        if pid != ranks[victim]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def check(path, allowed):
    """The checkpoint is one of these, whole, by torch's own reader; which?"""
    state = {"value": None, **{str(i): torch.zeros(200, 300) for i in range(4)}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert state["value"] in allowed, (state["value"], allowed)
    for i in range(4):
        assert bool((state[str(i)] == state["value"]).all()), (i, state["value"])
    return state["value"]


def kill():
    """Every rank at every moment, then any rank at random ones."""
    path, there = f"{folder}/killed", 1
    run(2, save_value, path, there)
    value, moments = there, ("planning", "before its file", "after its file")
    for victim, moment in [(rank, moment) for rank in (0, 1) for moment in moments] + [
            (0, "before .metadata"), (0, "after .metadata")]:
        value += 1
        kill_after(fork(2, save_value, path, value, victim, moment), victim, None)
        late = moment == "after .metadata"
        there = check(path, [value] if late else [there])
    rng = random.Random(14)
    for _ in range(8):
        value += 1
        kill_after(fork(2, save_value, path, value), rng.randrange(2), rng.uniform(0.02, 0.25))
        there = check(path, [there, value])
    run(2, save_value, path, value + 1)
    check(path, [value + 1])
    left = sorted(os.listdir(path))
    assert len(left) == 4 and left[:2] == [".metadata", ".penstock.lock"], left


def warm_up():
    """What torch imports late, the ranks need not import each for itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    path = f"{folder}/warm"
    dcp.save(sharded(1, full_state()), storage_writer=dcp.FileSystemWriter(path))
    load(0, 1, path, dcp.FileSystemReader)
    dist.destroy_process_group()


warm_up()
{"reshard": reshard, "fsdp": fsdp, "kill": kill}[sys.argv[1]]()
