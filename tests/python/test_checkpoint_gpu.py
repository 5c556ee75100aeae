# SPDX-License-Identifier: MIT
"""Checkpoints of states that are on GPUs: over the fake driver, with memory of the engine's in the
places of torch's storages, since a torch without CUDA has none there; and on a real one."""
import os
import random

import pytest
import torch

from penstock import Checkpointer, RandomState
from support import MIB, PACKAGE, environment, python, same

FAKES = PACKAGE.parent / "tests/fakes"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

# The fake driver runs copies as late as is lawful: who lets go of memory too early saves what was
# written there afterwards.
ENGINE = """
    import os, sys, torch
    import penstock
    from penstock import Checkpointer, _checkpointer, _device, _torch_save
    from penstock import _penstock as engine

    folder, snapshot, limit = sys.argv[1], sys.argv[2], sys.argv[3]
    gpu = engine.Device("cuda:0")
    SIZE = 3 << 20

    def move(memory, content, mode):
        name = folder + ".bytes"
        if mode == "r":
            with open(name, "wb") as file:
                file.write(content)
        with penstock.File(name, mode) as file:
            part = memory.array(0, 4, (SIZE,))
            file.read(part) if mode == "r" else file.write(part)
        with open(name, "rb") as file:
            return file.read()

    class Storage:
        copied = 0

        def __init__(self, content):
            self.memory = engine.Memory(gpu, SIZE)
            move(self.memory, content, "r")

        def nbytes(self):
            return SIZE

        def data_ptr(self):
            return self.memory.address

        def clone(self):
            Storage.copied += 1
            return Storage(move(self.memory, b"", "w"))

    class Storages:
        def __init__(self, found):
            self.found = found

        def on_devices(self):
            return [(storage, "cuda:0") for storage in self.found]

    _torch_save.collect = lambda torch, state: (b"\\x80\\x02N.", Storages(state))
    _torch_save.streams = lambda torch, devices: [(gpu, 1)]
    _checkpointer._room = lambda torch, device: 100 << 20
    ckpt = Checkpointer(folder, snapshot=snapshot,
                        memory_limit="auto" if limit == "auto" else int(limit))
    state = [Storage(bytes([i]) * SIZE) for i in range(1, 5)]
    for step in 1, 2:
        report = ckpt.save(step, state)
        for storage in state:
            move(storage.memory, bytes([200]) * SIZE, "r")
        ckpt.wait()
        file = torch._C.PyTorchFileReader(ckpt.path(step) + "/rank-00000.pt")
        for i in range(4):
            assert file.get_record(f"data/{i}") == bytes([200 if step == 2 else i + 1]) * SIZE, i
    assert Storage.copied == (8 if snapshot == "device" else 0)
    assert report.transfer.device == "cuda:0" and report.bytes == 4 * SIZE
    print(report.transfer.gathering or "none", ckpt.verify(1)["unverified_bytes"])
    ckpt.close()
    # The fake driver counts what it gave, and torch keeps modules alive beyond the end.
    del state, storage, gpu
    _device._devices.clear()
    penstock.trim()
"""


@pytest.mark.parametrize("snapshot, limit, said", [
    ("host", "auto", "ahead 0"), ("host", str(4 * MIB), "streamed 0"),
    ("device", "auto", "none 0")])
def test_memory_of_a_gpu_may_be_overwritten_when_save_returns(tmp_path, snapshot, limit, said):
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip(f"there is no fake libcuda.so.1 in {FAKES}")
    done = python(ENGINE, tmp_path / "ckpt", snapshot, limit, env=environment(
        LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1", FAKE_CUDA_ABORT_ON_LEAK="1"))
    assert done.stdout.split() == said.split()


# ----------------------------------------------------------------------------------- a real GPU --

@needs_gpu
@pytest.mark.parametrize("snapshot", ["host", "device"])
def test_kernels_queued_after_save_do_not_reach_the_file(tmp_path, snapshot):
    state = {f"t{i}": torch.full((4 * MIB,), float(i), device="cuda") for i in range(8)}
    state["host"] = torch.ones(MIB)
    with Checkpointer(tmp_path, snapshot=snapshot) as ckpt:
        for step in 1, 2, 3:
            for tensor in state.values():
                tensor.add_(1)
            ckpt.save(step, state)
            for tensor in state.values():
                tensor.mul_(-3).mul_(-1 / 3)
        ckpt.wait()
        for step in 1, 2, 3:
            found = ckpt.restore(step)
            assert all((found[f"t{i}"] - i - step).abs().max() < 1e-3 for i in range(8))


@needs_gpu
def test_a_device_copy_goes_back_to_torchs_allocator(tmp_path):
    state = [torch.ones(16 * MIB, device="cuda")]
    with Checkpointer(tmp_path, snapshot="device") as ckpt:
        before = torch.cuda.memory_allocated()
        ckpt.save(1, state)
        ckpt.wait()
        assert torch.cuda.memory_allocated() == before


@needs_gpu
def test_a_restore_holds_nothing_twice(tmp_path):
    model = torch.nn.Linear(2048, 2048, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2048, device="cuda")).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ckpt.restore(into=state)
        assert torch.cuda.max_memory_allocated() - before < MIB
        assert all(same(tensor, expected[name]) for name, tensor in model.state_dict().items())


@needs_gpu
def test_the_generators_of_gpus_are_among_the_random_state(tmp_path):
    torch.cuda.init()
    random.seed(3)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, RandomState())
        drawn = torch.rand(5, device="cuda"), random.random()
        ckpt.wait()
        ckpt.restore(into=RandomState())
    assert torch.equal(torch.rand(5, device="cuda"), drawn[0]) and random.random() == drawn[1]
    assert os.listdir(tmp_path)
