# SPDX-License-Identifier: MIT
"""The process that does one thing: one load, one ceiling, one reference.

  python -P worker.py JOB        JOB is a JSON object; the answer goes to the file job["answer"]
  python -P worker.py --serve    imports torch once, then reads one JOB per line from its input and
                                 forks a process for each: saves seconds per run, and the new
                                 process still makes its own CUDA context

It runs as a plain file, not as part of the package: importing the package would bring Penstock into
the processes of the others. What libraries print goes to standard error.
"""
from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TP_CHECKED = 50


def package():
    """The modules beside this file, as a package of their own name."""
    name = "penstock_compare"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, HERE / "__init__.py", submodule_search_locations=[str(HERE)])
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return name


def beside(name: str):
    return importlib.import_module(f"{package()}.{name}")


def version_of(distribution: str) -> str:
    from importlib import metadata
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(distribution)
        return str(getattr(module, "__version__", ""))


def words(error: BaseException) -> str:
    """An exception in one line, with the part of its text that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load(job: dict) -> dict:
    loaders, measure = beside("loaders"), beside("measure")
    loader = loaders.BY_NAME[job["loader"]]
    try:
        measure.device_ready(job["device"])
        work = loaders.Job(job["model"], job["files"], job["device"], job["torch_files"],
                           job["coded_files"])
        call = loader.prepare(work)
    except ImportError as error:
        return {"status": "missing", "reason": words(error)}
    except loaders.Unavailable as error:
        return {"status": "unavailable", "reason": str(error)}
    answer: dict[str, Any] = {"status": "ok", "version": version_of(loader.distribution)}
    watch = measure.Watch(job["device"]) if job["watch"] else None
    if watch:
        watch.start()
    with measure.busy(job["device"]) if job["busy"] else nullcontext():
        tensors, answer["seconds"], answer["cpu_seconds"] = measure.clocked(call, job["device"])
    if watch:
        answer["memory"] = watch.finish()
    if loader.distribution == "penstock" and (report := sys.modules["penstock"].last_report()):
        answer["report"] = report.as_dict()
    with open(job["reference"], encoding="utf-8") as file:
        expected = json.load(file)
    try:
        found = measure.fingerprints({name: tensor for name, tensor in tensors.items()
                                      if name in expected})
        trouble = measure.differences(expected, found)
    except (AttributeError, TypeError, RuntimeError) as error:
        trouble = f"what it returned could not be read: {words(error)}"
    if trouble:
        answer.update(status="wrong", reason=trouble)
    # As a program that works with its tensors does; what goes on behind its back may go on.
    time.sleep(job["stay"])
    return answer


def device(job: dict) -> dict:
    """Does the device work at all?"""
    try:
        beside("measure").device_ready(job["device"])
    except beside("loaders").Unavailable as error:
        return {"status": "unavailable", "reason": str(error)}
    return {"status": "ok"}


def halves_of(tensors: list[dict]) -> dict[str, tuple[slice, ...]]:
    """One rank's half of each tensor: rows, or columns for the layers whose input is split."""
    slices = {}
    for tensor in tensors:
        shape = tensor["shape"]
        across = len(shape) == 2 and tensor["name"].endswith(("o_proj.weight", "down_proj.weight"))
        axis = 1 if across else 0
        if len(shape) > axis and shape[axis] >= 2:
            slices[tensor["name"]] = (slice(None),) * axis + (slice(0, shape[axis] // 2),)
    return slices


def tensor_parallel(job: dict) -> dict:
    """Load the first of two ranks' halves: how many bytes storage gave, and are they right?"""
    measure = beside("measure")
    import torch
    measure.device_ready(job["device"])
    import penstock
    slices = halves_of(job["tensors"])
    tensors, seconds, cpu = measure.clocked(
        lambda: penstock.load_model(job["model"], device=job["device"], slices=slices),
        job["device"])
    report = penstock.last_report().as_dict()
    answer = {"status": "ok", "seconds": seconds, "cpu_seconds": cpu, "report": report,
              "bytes": sum(tensor.nbytes for tensor in tensors.values()),
              "storage_bytes": report["storage_bytes"]}
    cut = [entry for entry in job["tensors"] if entry["name"] in slices and entry["bytes"]]
    # Some of every kind is enough; neighbours have other kinds.
    for entry in cut[::1 + len(cut) // TP_CHECKED]:
        name = entry["name"]
        loaded = tensors[name].cpu()
        data = torch.from_file(entry["file"], size=entry["offset"] + entry["bytes"],
                               dtype=torch.uint8)[entry["offset"]:].clone()
        whole = data.view(loaded.dtype).reshape(entry["shape"])[slices[name]].contiguous()
        if not torch.equal(whole.view(torch.uint8), loaded.contiguous().view(torch.uint8)):
            return answer | {"status": "wrong", "reason": f"{name} holds other bytes"}
    return answer


def save_torch(job: dict) -> dict:
    """Write a .pt file with the tensors of a safetensors file, complete or not at all."""
    import torch
    from safetensors.torch import load_file
    partial = job["target"] + ".partial"
    torch.save(load_file(job["source"]), partial)
    os.replace(partial, job["target"])
    return {"status": "ok"}


def save_coded(job: dict) -> dict:
    """Write the tensors of a safetensors file coded."""
    from penstock import load_file, save_file
    save_file(load_file(job["source"]), job["target"], coded=True)
    return {"status": "ok"}


def do(job: dict) -> dict:
    kind = job["kind"]
    if kind == "load":
        return load(job)
    if kind == "device":
        return device(job)
    if kind == "reference":
        found = beside("measure").reference(job["tensors"])
        Path(job["reference"]).write_text(json.dumps(found), encoding="utf-8")
        return {"status": "ok"}
    if kind == "disk":
        return {"status": "ok", "rows": beside("ceilings").disk(
            job["files"], job["geometries"], job["seconds"], job["reads"])}
    if kind == "cache":
        return {"status": "ok", "rows": beside("ceilings").cache(
            job["files"], job["seconds"], job["reads"])}
    if kind == "reads":
        ceilings, size = beside("ceilings"), sum(Path(file).stat().st_size for file in job["files"])
        return {"status": "ok", "row": ceilings.read_files(
            job["files"], job["threads"], job["request"], False, size / 1e8)}
    if kind == "copy":
        beside("measure").device_ready(job["device"])
        return {"status": "ok", "rows": beside("ceilings").copy(job["device"])}
    if kind == "save-torch":
        return save_torch(job)
    if kind == "save-coded":
        return save_coded(job)
    if kind == "tensor-parallel":
        return tensor_parallel(job)
    raise ValueError(f"no job of the kind {kind}")


def work(job: dict) -> None:
    """Do a job and leave its answer; ends the process, without what libraries do on the way out."""
    os.dup2(2, 1)
    sys.path[:0] = job.get("path", [])
    os.environ.update(job.get("environment", {}))
    try:
        answer = do(job)
    except ImportError as error:
        answer = {"status": "missing", "reason": words(error)}
    except BaseException as error:  # noqa: BLE001 - whatever a foreign loader throws is its result
        traceback.print_exc()
        answer = {"status": "failed", "reason": words(error)}
    Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    sys.stderr.flush()
    os._exit(0)


def serve() -> None:
    """Answers each job with two lines: the process that does it, and how that ended."""
    import torch  # noqa: F401 - what the forked processes need not import again
    beside("measure")
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            try:
                replies.close()
                # Torn from the server's input, which must not be read twice.
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                work(json.loads(line))
            finally:
                os._exit(1)
        print(child, file=replies)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=replies)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        work(json.loads(sys.argv[1]))
