# SPDX-License-Identifier: MIT
"""Files of torch and the memory of GPUs.

The engine's part runs over the fake driver, in processes of its own, since a torch without CUDA has
no such memory; the whole runs where torch sees a GPU.
"""
import os
import zipfile

import pytest
import torch

import penstock
from penstock import _torch_load
from support import MIB, PACKAGE, environment, python
from torch_objects import alike

FAKES = PACKAGE.parent / "tests/fakes"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

# ----------------------------------------------------------------------------- the fake driver --

ENGINE = """
    import sys
    import penstock
    from penstock import _penstock as engine

    path, transfer = sys.argv[1], engine.transfer_type(sys.argv[2])
    host, gpu = engine.Device("host"), engine.Device("cuda:0")
    sizes = [5 << 20, 100, (1 << 20) + 77, 64 << 10, 0, 3]
    data = [bytes((i * 7 + at * 13) % 251 for at in range(997)) * (size // 997 + 1)
            for i, size in enumerate(sizes)]
    data = [content[:size] for content, size in zip(data, sizes)]

    def room(size, device):
        return engine.Memory(device, max(size, 1))

    def move(memory, size, name, mode):
        with penstock.File(name, mode) as file:
            part = memory.array(0, 4, (size,))
            file.read(part) if mode == "r" else file.write(part)

    devices = [gpu, gpu, host, gpu, gpu, host]
    memory = [room(size, device) for size, device in zip(sizes, devices)]
    for i, (piece, size) in enumerate(zip(memory, sizes)):
        with open(f"{path}.{i}", "wb") as file:
            file.write(data[i])
        if size:
            move(piece, size, f"{path}.{i}", "r")
    job = engine.torch_save(path, host, [("data.pkl", b"\\x80\\x02N.")],
                            [(m.address, s, d) for m, s, d in zip(memory, sizes, devices)], memory,
                            transfer, None, [(gpu, 1)])
    written = job.wait()
    file = engine.TorchFile(path)
    records = file.records()
    assert file.read(records["data.pkl"][0]) == b"\\x80\\x02N."
    landing = [room(size, device) for size, device in zip(sizes, devices)]
    wanted = [(records[f"data/{i}"][0], landing[i].address, devices[i]) for i in range(len(sizes))]
    job = file.load(host, wanted, landing, True, transfer, None, [(gpu, 1)])
    told = set()
    while groups := job.landed():
        told.update(groups)
    read = job.wait()
    assert told == set(range(len(sizes))), told
    for i, (piece, size) in enumerate(zip(landing, sizes)):
        if size:
            move(piece, size, f"{path}.back", "w")
            assert open(f"{path}.back", "rb").read() == data[i], i
    print(written["digested_bytes"], written["unverified_bytes"], read["digested_bytes"],
          read["unverified_bytes"], sum(sizes))
    print(penstock.Report(read))
"""


def over_the_fake(code: str, *arguments, **env) -> str:
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip(f"there is no fake libcuda.so.1 in {FAKES}")
    return python(code, *arguments, env=environment(
        LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1", FAKE_CUDA_ABORT_ON_LEAK="1", **env)
                  ).stdout


@pytest.mark.parametrize("transfer", ["auto", "2", "CPU_ASYNC_GPU", "Storage->CPU->GPU",
                                      "Storage->PAGE_CACHE->CPU->GPU"])
def test_storages_of_a_gpu_and_of_the_host_are_one_file(tmp_path, transfer):
    said, report = over_the_fake(ENGINE, tmp_path / "x.pt", transfer).split("\n", 1)
    digested, unverified, verified, not_verified, total = map(int, said.split())
    assert "unverified" not in report and digested >= total and unverified == 0
    assert (verified, not_verified) == (total, 0)
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        assert file.testzip() is None
        assert file.read("x/data/0") == (tmp_path / "x.pt.0").read_bytes()


@pytest.mark.parametrize("transfer", ["GPU_DIRECT", "Storage->GPU_ASYNC", "6", "7"])
def test_bytes_that_no_core_sees_are_told_as_unverified(tmp_path, transfer):
    said, report = over_the_fake(ENGINE, tmp_path / "x.pt", transfer).split("\n", 1)
    digested, unverified, verified, not_verified, total = map(int, said.split())
    assert "  unverified: 0.00" in report, "not silently"
    assert unverified >= 5 * MIB and not_verified >= 5 * MIB
    assert verified + not_verified == total
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        assert file.testzip() is None


def test_a_save_that_is_let_go_of_leaves_nothing(tmp_path):
    over_the_fake("""
        import sys
        from penstock import _penstock as engine

        host, gpu = engine.Device("host"), engine.Device("cuda:0")
        memory = engine.Memory(gpu, 64 << 20)
        job = engine.torch_save(sys.argv[1], host, [("data.pkl", b"\\x80\\x02N.")],
                                [(memory.address, 64 << 20, gpu)], memory)
        del job, memory
    """, tmp_path / "x.pt")
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------- where storages go --

@pytest.mark.parametrize("where, location, gpu", [
    (None, "cuda:1", "cuda:1"), (None, "cuda", "cuda:0"), (None, "cpu", None), (None, None, None),
    (None, "xpu:0", None), ("cuda:1", "cpu", "cuda:1"), (torch.device("cuda", 1), None, "cuda:1"),
    ("cpu", "cuda:0", None), ({"cpu": "cuda:1"}, "cpu", "cuda:1"),
    ({"cuda:0": "cpu"}, "cuda:0", None), ({"cuda:0": "cpu"}, "cuda:1", "cuda:1"),
    (lambda storage, location: None, "cuda:0", None), (None, "cudafication", None)])
def test_which_storages_go_straight_to_a_gpu(monkeypatch, where, location, gpu):
    monkeypatch.setattr(torch.serialization, "validate_cuda_device",
                        lambda location: int(location.partition(":")[2] or 0))
    assert _torch_load._gpu_of(torch, where, location) == gpu


def test_ways_that_others_have_registered_come_first(monkeypatch):
    registry = [(5, None, None), *torch.serialization._package_registry]
    monkeypatch.setattr(torch.serialization, "_package_registry", registry)
    assert _torch_load._gpu_of(torch, None, "cuda:0") is None


def test_locations_are_found_in_the_pickle(tmp_path):
    from test_torch_load import on_cuda

    on_cuda(tmp_path / "x.pt")
    file = penstock._penstock.TorchFile(tmp_path / "x.pt")
    records = file.records()
    assert file.locations() == {records["data/0"][0]: "cuda:0", records["data/1"][0]: "cuda:0"}


# ----------------------------------------------------------------------------------- a real GPU --

def state() -> dict:
    """On the GPU and on the host, shared, small and large."""
    large = torch.randn(3 * MIB, device="cuda")
    return {"large": large, "part": large[100:200], "turned": large.reshape(3, -1).t(),
            "small": [torch.full((i,), float(i), device="cuda") for i in range(50)],
            "step": torch.tensor(7.0), "host": torch.randn(MIB),
            "none": torch.empty(0, device="cuda"),
            "conjugate": torch.randn(9, dtype=torch.complex64, device="cuda").conj()}


@needs_gpu
@pytest.mark.parametrize("transfer", ["auto", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU",
                                      "Storage->CPU->GPU_ASYNC"])
def test_a_gpus_state_goes_and_comes(tmp_path, transfer):
    given = state()
    penstock.save(given, tmp_path / "x.pt", transfer=transfer)
    assert penstock.last_report().unverified_bytes == 0
    assert alike(torch.load(tmp_path / "x.pt"), given)
    torch.save(given, tmp_path / "y.pt")
    for name in "x.pt", "y.pt":
        assert alike(penstock.load(tmp_path / name, transfer=transfer), given)
        assert penstock.last_report().unverified_bytes == 0
        assert alike(penstock.load(tmp_path / name, device="cpu"),
                     torch.load(tmp_path / name, map_location="cpu"))
        assert alike(penstock.load(tmp_path / name, map_location={"cpu": "cuda:0"}),
                     torch.load(tmp_path / name, map_location={"cpu": "cuda:0"}))


@needs_gpu
def test_work_on_the_current_stream_is_saved_as_it_will_be(tmp_path):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(16 * MIB, device="cuda")
        for _ in range(500):
            tensor.add_(1)
        penstock.save([tensor], tmp_path / "x.pt")
        tensor.zero_()
    assert torch.load(tmp_path / "x.pt")[0].min() == 500


@needs_gpu
def test_memory_is_torchs_own_and_goes_by_itself(tmp_path):
    penstock.save([torch.ones(16 * MIB, device="cuda"), torch.ones(1000, device="cuda")],
                  tmp_path / "x.pt")
    before = torch.cuda.memory_allocated()
    found = penstock.load(tmp_path / "x.pt")
    assert torch.cuda.memory_allocated() - before == 64 * MIB + 4096
    found[0].resize_(17 * MIB)
    found[0] = None
    assert torch.cuda.memory_allocated() - before == 4096
