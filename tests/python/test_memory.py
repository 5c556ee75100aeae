# SPDX-License-Identifier: MIT
"""What a load costs in host memory beside the tensors: little, and the same for any size."""
import pytest

from support import MIB, python, write_holes

pytestmark = pytest.mark.slow

# Runs `work` and prints by how much anonymous memory grew at most, in bytes.
MEASURE = """
    import gc, sys, threading, time
    import numpy
    import penstock

    def anonymous():
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("RssAnon"):
                    return int(line.split()[1]) << 10

    class Peak:
        def __enter__(self):
            gc.collect()
            self.before = self.most = anonymous()
            self.stop = False
            self.thread = threading.Thread(target=self.watch)
            self.thread.start()
        def watch(self):
            while not self.stop:
                self.most = max(self.most, anonymous())
                time.sleep(0.001)
        def __exit__(self, *_):
            self.stop = True
            self.thread.join()
            print(self.most - self.before)

    path = sys.argv[1]
    sizes = {f"t{i}": 50_000_000 for i in range(10)}
    """


@pytest.fixture(scope="module")
def half_gigabyte(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "x.safetensors"
    write_holes(path, {f"t{i}": 50_000_000 for i in range(10)})
    return path


def measure(path, code: str, *more) -> int:
    return int(python(MEASURE + code, path, *more).stdout)


def test_a_load_into_existing_memory_grows_by_at_most_64_mib(half_gigabyte):
    growth = measure(half_gigabyte, """
    into = {name: numpy.ones(size, numpy.uint8) for name, size in sizes.items()}
    with Peak():
        penstock.load_file(path, framework="np", into=into)
    for name, array in into.items():
        assert array[0] == int(name[1:]) + 1 and not array[1:].any()
    """)
    assert growth < 72 * MIB


def test_a_load_holds_the_tensors_once(half_gigabyte):
    growth = measure(half_gigabyte, """
    with Peak():
        loaded = penstock.load_file(path, framework="np", copy=True)
    """)
    assert growth < 500_000_000 + 72 * MIB


def test_a_conversion_holds_little_beside_the_result(tmp_path):
    """bf16 to float32 on the host: the result and the staging, nothing of the source."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({f"t{i}": torch.ones(5_000_000, dtype=torch.bfloat16) for i in range(10)}, path)
    growth = measure(path, """
    import torch
    torch.ones(10).to(torch.bfloat16).to(torch.float32)
    gc.collect()
    with Peak():
        loaded = penstock.load_file(path, dtype="float32", arena=False)
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    """)
    assert growth < 200_000_000 + 72 * MIB


def test_a_stream_whose_tensors_are_dropped_holds_its_window(half_gigabyte):
    growth = measure(half_gigabyte, """
    with Peak():
        for name, tensor in penstock.stream(path, framework="np", window=100_000_000, copy=True):
            assert tensor[0] == int(name[1:]) + 1
            del tensor
    """)
    assert growth < 2 * 100_000_000 + 72 * MIB


@pytest.mark.parametrize("order", ["keys", "offset_keys"])
def test_reading_one_by_one_holds_a_part_of_the_file(tmp_path, order):
    """The orders of names and of offsets begin alike and part in the middle."""
    path = tmp_path / "x.safetensors"
    names = [f"t{i:02}" for i in range(10)] + [f"t{i:02}" for i in range(39, 9, -1)]
    write_holes(path, {name: 16_000_000 for name in names})
    growth = measure(path, """
    with Peak(), penstock.safe_open(path, "np", copy=True) as file:
        for name in getattr(file, sys.argv[2])():
            assert file.get_tensor(name)[0]
    """, order)
    assert growth < 350_000_000


def test_a_slice_holds_the_slice(half_gigabyte):
    growth = measure(half_gigabyte, """
    index = {name: (slice(10_000_000, 11_000_000),) for name in sizes}
    with Peak():
        loaded = penstock.load_file(path, framework="np", slices=index)
    """)
    assert growth < 10_000_000 + 72 * MIB


def test_a_save_holds_no_copy(tmp_path):
    growth = measure(tmp_path / "x.safetensors", """
    arrays = {name: numpy.ones(size // 2, numpy.uint8) for name, size in sizes.items()}
    with Peak():
        penstock.save_file(arrays, path)
    """)
    assert growth < 72 * MIB
    (tmp_path / "x.safetensors").unlink()


def test_a_header_with_many_tensors_is_not_kept(tmp_path):
    path = tmp_path / "x.safetensors"
    write_holes(path, {f"layers.{i}.some.name.as.long.as.usual.weight": 8 for i in range(10_000)})
    growth = measure(path, """
    penstock.load_file(path, framework="dlpack", keys="layers.7.*")
    with Peak():
        for _ in range(20):
            penstock.load_file(path, framework="dlpack", keys="layers.7.*")
    """)
    assert growth < 32 * MIB
