# SPDX-License-Identifier: MIT
"""The Python package under test, and what its tests share.

The package comes from the plain build (build/python); PENSTOCK_PYTHON names another folder, so that
the same suite judges an installed package or a build on a GPU server. Where nothing is built, the
modules that need the package are skipped and say so; a package that is there and does not import is
a failure. The `device` fixture is the host everywhere and a GPU as well where torch sees one.
"""
import importlib
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = Path(os.environ.get("PENSTOCK_PYTHON", ROOT / "build/python")).resolve()
BUILT = bool(list((PACKAGE / "penstock").glob("_penstock*.so")))

sys.path.insert(0, str(PACKAGE))
# JAX would take three quarters of a GPU for itself, and other tests run beside it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def devices() -> list[str]:
    """The host, and the first GPU where torch can use one."""
    try:
        import torch
    except ImportError:
        return ["cpu"]
    return ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]


class NotBuilt(pytest.Module):
    """A module of tests that wait for the package: one skipped item with the reason."""

    def collect(self):
        yield NotBuiltItem.from_parent(self, name="needs_the_package")


class NotBuiltItem(pytest.Item):
    def runtest(self):
        pytest.skip(f"the Python package is not built: no {PACKAGE}/penstock/_penstock*.so")


def pytest_pycollect_makemodule(module_path, parent):
    text = module_path.read_text()
    if not BUILT and re.search(r"^\s*(import|from) (penstock|support)\b", text, re.MULTILINE):
        return NotBuilt.from_parent(parent, path=module_path)
    return None


@pytest.fixture(autouse=True)
def nothing_is_prefetched():
    """What one test began and left, another would find."""
    yield
    module = sys.modules.get("penstock._prefetch")
    for left in list(module._begun.values()) if module else ():
        left.cancel()


@pytest.fixture(scope="session", params=devices())
def device(request) -> str:
    """Where tensors go: the host, and a GPU where there is one."""
    return request.param


@pytest.fixture(params=["mapped", "copied"])
def each_way(request, monkeypatch) -> str:
    """Loads to the host look into the mapped file, or have the engine copy it, as it does to a GPU
    and with copy=True."""
    if request.param == "copied":
        from penstock import _load, _safe_open

        for module in _load, _safe_open:
            monkeypatch.setattr(module, "maps_files", lambda *_: False)
    return request.param


@pytest.fixture(scope="session")
def bench_module():
    """Imports a program of bench/, which finds its neighbours as when it is run."""
    pytest.importorskip("torch")

    def find(name: str):
        sys.path.insert(0, str(ROOT / "bench"))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(ROOT / "bench"))

    return find


@pytest.fixture(scope="session")
def big(tmp_path_factory):
    """A file of 320 MB with one tensor of 200 MB and four of 30 MB, and its tensors."""
    import torch
    from safetensors.torch import save_file
    from support import random_tensor

    tensors = {"large": random_tensor(torch.float32, (50, 1000, 1000), seed=1)}
    for i in range(4):
        tensors[f"part.{i:02}"] = random_tensor(torch.bfloat16, (15, 1000, 1000), seed=2 + i)
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    save_file(tensors, path)
    yield path, tensors
    path.unlink()


@pytest.fixture(scope="session")
def holes(tmp_path_factory):
    """A file of 1 GiB that is almost all hole: slow to load, for nothing on the disk.

    Sixteen tensors of 64 MiB, "t00" to "t15", that are zero but for their first byte.
    """
    from support import write_holes

    path = tmp_path_factory.mktemp("holes") / "holes.safetensors"
    write_holes(path, {f"t{i:02}": 64 << 20 for i in range(16)})
    yield path
    path.unlink()


@pytest.fixture
def few(tmp_path):
    """A small file with several kinds of tensors, and its tensors."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        "model.embed.weight": torch.randn(16, 8),
        "model.layers.0.mlp.weight": torch.randn(12, 6).to(torch.bfloat16),
        "model.layers.0.norm.weight": torch.ones(8, dtype=torch.float16),
        "model.layers.1.mlp.weight": torch.randn(12, 6).to(torch.bfloat16),
        "step": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
    }
    path = tmp_path / "few.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path, tensors
