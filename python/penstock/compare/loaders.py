# SPDX-License-Identifier: MIT
"""How each loader is called: the way its own documentation shows, with the settings named here.

A loader is a function that takes a Job, imports its library, and returns the call that is timed;
that call returns the tensors by name. What the library needs for its life is kept by the closure,
so that nothing is freed inside the time, and nothing that others leave out is counted: the time
ends when the last tensor can be used, before buffers are given back.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from .model import header_read

Tensors = dict[str, Any]
KVIKIO_THREADS = 16
KVIKIO_TASK = 16 << 20
# Importing transformers and the code of an architecture, before the clock starts.
TRANSFORMERS_SECONDS = 10.0


class Unavailable(Exception):
    """This loader cannot do this here; the words say why."""


@dataclass
class Job:
    """What a worker is asked to do."""
    model: str
    files: list[str]
    device: str
    torch_files: list[str] = field(default_factory=list)
    coded_files: list[str] = field(default_factory=list)
    # What must outlive the call that is timed.
    keep: list = field(default_factory=list)

    @property
    def index(self) -> int:
        return int(self.device.partition(":")[2] or 0)


@dataclass(frozen=True)
class Loader:
    name: str
    label: str
    setting: str
    distribution: str
    prepare: Callable[[Job], Callable[[], Tensors]]
    cuda_only: bool = False
    torch_files: bool = False
    coded_files: bool = False
    # Of the first class: what Penstock is measured against. All its rounds come before the others'.
    first: bool = False
    # About how long it takes to get ready; matters where time is short, until it is known.
    start_seconds: float = 1.0


def penstock(job: Job) -> Callable[[], Tensors]:
    import penstock as library

    def load() -> Tensors:
        return library.load_model(job.model, device=job.device)
    return load


def penstock_coded(job: Job) -> Callable[[], Tensors]:
    import penstock as library

    def load() -> Tensors:
        return library.load_model(job.coded_files, device=job.device)
    return load


def model_folder(job: Job) -> str:
    path = Path(job.model)
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise Unavailable(f"there is no config.json in {folder}")
    if not path.is_dir() and path.name not in ("model.safetensors",
                                               "model.safetensors.index.json"):
        raise Unavailable("it loads folders with a model.safetensors, not a single file")
    return str(folder)


def named(model: Any) -> Tensors:
    """Parameters and buffers under every name they have, tied ones too."""
    return dict(model.state_dict(keep_vars=True))


def import_architecture(folder: str) -> None:
    """transformers imports the code of a model when it first makes one; imports are not timed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def penstock_pretrained(job: Job) -> Callable[[], Tensors]:
    import penstock as library
    folder = model_folder(job)
    import_architecture(folder)

    def load() -> Tensors:
        model = library.from_pretrained(folder, device=job.device)
        job.keep.append(model)
        return named(model)
    return load


def transformers(job: Job) -> Callable[[], Tensors]:
    from transformers import AutoModelForCausalLM
    folder = model_folder(job)
    import_architecture(folder)

    def load() -> Tensors:
        model = AutoModelForCausalLM.from_pretrained(folder, device_map=job.device, dtype="auto")
        job.keep.append(model)
        return named(model)
    return load


def safetensors(job: Job) -> Callable[[], Tensors]:
    from safetensors.torch import load_file

    def load() -> Tensors:
        tensors: Tensors = {}
        for file in job.files:
            tensors.update(load_file(file, device=job.device))
        return tensors
    return load


def safetensors_cpu(job: Job) -> Callable[[], Tensors]:
    from safetensors.torch import load_file

    def load() -> Tensors:
        tensors: Tensors = {}
        for file in job.files:
            tensors.update((name, tensor.to(job.device))
                           for name, tensor in load_file(file).items())
        return tensors
    return load


def safetensors_prefetch(job: Job) -> Callable[[], Tensors]:
    from safetensors import safe_open
    if not hasattr(safe_open, "prefetch"):
        raise Unavailable("this safetensors has no prefetch; 0.9 does (give its folder by --path)")

    def load() -> Tensors:
        handles = [safe_open(file, framework="pt", device=job.device) for file in job.files]
        loaders = [handle.prefetch() for handle in handles]
        tensors: Tensors = {}
        for loader in loaders:
            tensors.update(loader)
        job.keep += [handles, loaders]
        return tensors
    return load


def torch_load(job: Job, mapped: bool = False) -> Callable[[], Tensors]:
    import torch

    def load() -> Tensors:
        tensors: Tensors = {}
        for file in job.torch_files:
            tensors.update(torch.load(file, map_location=job.device, weights_only=True,
                                      mmap=mapped))
        return tensors
    return load


def torch_load_mapped(job: Job) -> Callable[[], Tensors]:
    return torch_load(job, mapped=True)


def fastsafetensors(job: Job) -> Callable[[], Tensors]:
    from fastsafetensors import fastsafe_open

    def load() -> Tensors:
        handle = fastsafe_open(job.files, framework="pt", device=job.device, nogds=True)
        job.keep.append(handle)
        return {name: handle.get_tensor(name) for name in handle.keys()}
    return load


def instanttensor(job: Job, **options: Any) -> Callable[[], Tensors]:
    from instanttensor import safe_open

    def load() -> Tensors:
        handle = safe_open(job.files, framework="pt", device=job.index, **options)
        job.keep.append(handle)
        return dict(handle.__enter__().tensors())
    return load


def instanttensor_buffered(job: Job) -> Callable[[], Tensors]:
    from instanttensor import BackendPolicy
    return instanttensor(job, backend=BackendPolicy.BUFFERED)


def instanttensor_mapped(job: Job) -> Callable[[], Tensors]:
    from instanttensor import Backend
    return instanttensor(job, backend=Backend.MMAP)


def runai(job: Job) -> Callable[[], Tensors]:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Tensors:
        streamer = SafetensorsStreamer()
        job.keep.append(streamer)
        streamer.__enter__().stream_files(job.files, device=job.device)
        return dict(streamer.get_tensors())
    return load


def kvikio(job: Job) -> Callable[[], Tensors]:
    import kvikio as library
    import kvikio.defaults
    import torch
    library.defaults.set({"num_threads": KVIKIO_THREADS, "task_size": KVIKIO_TASK})

    def load() -> Tensors:
        tensors: Tensors = {}
        for file in job.files:
            # The whole file, so that its reads are aligned, which suits it best.
            size = os.path.getsize(file)
            data = torch.empty(size, dtype=torch.uint8, device=job.device)
            with library.CuFile(file) as handle:
                count = handle.read(data)
            if count != size:
                raise OSError(f"KvikIO read {count} of {size} bytes of {file}")
            for tensor in header_read(file)[1]:
                tensors[tensor.name] = data[tensor.offset:tensor.offset + tensor.bytes]
        return tensors
    return load


# What matters most comes first: where time is short, the last are left out, and those that are not
# of the first class before any of it.
LOADERS = (
    Loader("penstock", "Penstock", "none", "penstock", penstock, first=True),
    Loader("penstock-coded", "Penstock", "coded model", "penstock", penstock_coded,
           coded_files=True, first=True),
    Loader("fastsafetensors", "fastsafetensors", "nogds", "fastsafetensors", fastsafetensors,
           first=True),
    Loader("instanttensor-buffered", "InstantTensor", "BUFFERED", "instanttensor",
           instanttensor_buffered, cuda_only=True, first=True),
    Loader("instanttensor-mmap", "InstantTensor", "MMAP", "instanttensor", instanttensor_mapped,
           cuda_only=True, first=True),
    Loader("instanttensor", "InstantTensor", "default", "instanttensor", instanttensor,
           cuda_only=True),
    Loader("kvikio", "KvikIO", f"{KVIKIO_THREADS} threads, {KVIKIO_TASK >> 20} MiB", "kvikio-cu13",
           kvikio, cuda_only=True, first=True),
    Loader("transformers", "transformers", "from_pretrained", "transformers", transformers,
           start_seconds=TRANSFORMERS_SECONDS),
    Loader("safetensors-prefetch", "safetensors", "prefetch", "safetensors", safetensors_prefetch,
           cuda_only=True),
    Loader("safetensors-cpu", "safetensors", "CPU, then .to()", "safetensors", safetensors_cpu),
    Loader("safetensors", "safetensors", "load_file", "safetensors", safetensors),
    Loader("penstock-pretrained", "Penstock", "from_pretrained", "penstock", penstock_pretrained,
           start_seconds=TRANSFORMERS_SECONDS),
    Loader("runai", "Run:ai streamer", "default", "runai-model-streamer", runai),
    Loader("torch-mmap", "torch.load", "mmap", "torch", torch_load_mapped, torch_files=True),
    Loader("torch", "torch.load", "default", "torch", torch_load, torch_files=True),
)
BY_NAME = {loader.name: loader for loader in LOADERS}
