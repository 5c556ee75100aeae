# SPDX-License-Identifier: MIT
"""From the start of a process to weights that can be used. Bare, so that nothing else is timed.

  python -P startup.py KIND STARTED MODEL DEVICE

STARTED is the monotonic clock of the moment before this process was started. Prints the marks it
passed, in seconds since then, as JSON:

  context        a CUDA context through libcuda, nothing else: what no program gets around
  penstock       penstock.load_model(framework="dlpack"): no torch
  torch          import torch and its CUDA context
  penstock-torch       prefetch, import torch, load_model
  penstock-pretrained  prefetch, import torch, from_pretrained
  transformers         import torch, AutoModelForCausalLM.from_pretrained
"""
import sys
import time

kind, started, model, device = sys.argv[1:5]
marks = {}


def mark(name):
    marks[name] = time.monotonic() - float(started)


def main():
    mark("python")
    if kind == "context":
        import ctypes
        cuda = ctypes.CDLL("libcuda.so.1")
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        index = int(device.partition(":")[2] or 0)
        for failed in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(handle), index),
                       cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)):
            if failed:
                sys.exit(f"CUDA answers {failed}")
        mark("ready")
        return
    if kind.startswith("penstock"):
        import penstock
        mark("import penstock")
        if kind == "penstock":
            tensors = penstock.load_model(model, device=device, framework="dlpack")
            mark("ready")
            marks["tensors"] = len(tensors)
            return
        penstock.prefetch(model, device)
    import torch
    mark("import torch")
    if kind == "penstock-torch":
        tensors = penstock.load_model(model, device=device)
    elif kind == "penstock-pretrained":
        tensors = penstock.from_pretrained(model, device=device)
    elif kind == "transformers":
        from transformers import AutoModelForCausalLM
        tensors = AutoModelForCausalLM.from_pretrained(model, device_map=device, dtype="auto")
    else:
        tensors = torch.zeros(1, device=device)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    mark("ready")
    del tensors


main()
import json  # noqa: E402 - after the last mark

print("startup", json.dumps(marks), flush=True)
import os  # noqa: E402

os._exit(0)
