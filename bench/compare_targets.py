# SPDX-License-Identifier: MIT
"""The project's targets for loading models, beside what bench/gpu-compare.sh measured.

  python3 compare_targets.py FOLDER      reads compare-0.6b.json and compare-7b.json there

A target is met, not met, or has no verdict, as when it was not measured. Nothing is rounded in
favour of anybody.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Callable

MIB = 1 << 20
OURS = ("penstock", "penstock-pretrained")
Target = tuple[str, str, bool | None]


def median_of(found: dict, name: str, state: str) -> float | None:
    for row in found["loaders"]:
        if row["name"] == name and row["status"] != "wrong" and state in row["states"]:
            return row["states"][state]["seconds"]["median"]
    return None


def peers(found: dict, state: str, without: tuple[str, ...] = ()) -> list[tuple[float, str]]:
    """The other loaders with their medians, fastest first."""
    return sorted((time, row["name"]) for row in found["loaders"]
                  if row["name"] not in OURS + without
                  and (time := median_of(found, row["name"], state)) is not None)


def against(found: dict, state: str, factor: float, without: tuple[str, ...] = (),
            only: str = "") -> tuple[str, bool | None]:
    """Penstock must be `factor` times as fast as the fastest of the others, or as one."""
    mine = median_of(found, "penstock", state)
    others = [(time, name) for time, name in peers(found, state, without)
              if not only or name == only]
    if mine is None or not others:
        return "not measured", None
    time, name = others[0]
    return f"{time / mine:.2f} x ({mine:.3f} s, {name} {time:.3f} s)", time / mine >= factor


def share(found: dict, state: str, least: float) -> tuple[str, bool | None]:
    value = found["shares"].get(state)
    if value is None or not found["device"].startswith("cuda"):
        return "not measured", None
    key = "copy_gb_per_s" if state == "warm" else "disk_gb_per_s"
    ceiling = found["ceilings"][key]["median"]
    return f"{value:.1%} of {ceiling:.2f} GB/s", value >= least


def at_most(value: float | None, most: float, text: Callable[[float], str]) \
        -> tuple[str, bool | None]:
    return ("not measured", None) if value is None else (text(value), value <= most)


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms"


def mebibytes(value: float) -> str:
    return f"{value / MIB:.1f} MiB"


def large(found: dict) -> list[Target]:
    targets = [
        ("7B warm: at least 88 % of pinned copies (goal 94 %)", *share(found, "warm", 0.88)),
        ("7B warm: 10 % faster than every peer's best", *against(found, "warm", 1.10)),
        ("7B warm: 6 x transformers", *against(found, "warm", 6.0, only="transformers")),
        ("7B cold: at least 95 % of raw O_DIRECT", *share(found, "cold", 0.95)),
        ("7B cold: no slower than the fastest peer", *against(found, "cold", 1.0)),
        ("7B cold: 1.3 x KvikIO", *against(found, "cold", 1.3, only="kvikio")),
        ("7B cold: 1.8 x all others",
         *against(found, "cold", 1.8, without=("fastsafetensors", "kvikio"))),
        ("7B half warm: faster than every peer", *against(found, "mixed", 1.0)),
        ("7B half warm: between warm and cold", *between(found)),
    ]
    targets += memory(found, "7B")
    tp = found["tensor_parallel"]
    measured: tuple[str, bool | None] = ("not measured", None)
    if tp and tp["status"] == "ok":
        measured = at_most(tp["storage_bytes"] / tp["file_bytes"], 0.55, lambda v: f"{v:.1%}")
    elif tp:
        measured = (f"{tp['status']}: {tp['reason']}", False)
    return targets + [("7B, half of each tensor: at most 55 % of the file read", *measured)]


def between(found: dict) -> tuple[str, bool | None]:
    warm, mixed, cold = (median_of(found, "penstock", state)
                         for state in ("warm", "mixed", "cold"))
    if warm is None or mixed is None or cold is None:
        return "not measured", None
    return f"{warm:.3f} < {mixed:.3f} < {cold:.3f} s", warm < mixed < cold


def memory(found: dict, size: str) -> list[Target]:
    row = next((row for row in found["loaders"] if row["name"] == "penstock"), None)
    values = row and row["memory"]
    if not values:
        return [(f"{size}: host and device memory", "not measured", None)]
    pinned = values["pinned_bytes"]
    extra = values["gpu_extra_bytes"]
    tensors = found["model"]["tensor_bytes"]
    beyond = None if pinned is None else values["host_bytes"] - pinned
    return [
        (f"{size}: at most 128 MiB pinned", *at_most(pinned, 128 * MIB, mebibytes)),
        (f"{size}: at most 64 MiB of anonymous growth besides",
         *at_most(beyond, 64 * MIB, mebibytes)),
        (f"{size}: at most 1 % of device memory beyond the tensors",
         *at_most(None if extra is None else extra / tensors, 0.01,
                  lambda v: f"{v:.2%} ({mebibytes(v * tensors)})")),
    ]


def small(found: dict) -> list[Target]:
    startup = found["startup"] or {}

    def mark(kind: str, key: str) -> float | None:
        return startup.get(kind, {}).get(key, {}).get("median")

    ready, context = mark("penstock", "ready"), mark("context", "ready")
    late = None if ready is None or context is None else ready - context
    ours = mark("penstock-pretrained", "after_import_torch")
    tensors = mark("penstock-torch", "after_import_torch")
    theirs = mark("transformers", "after_import_torch")
    told = "not measured"
    if ours is not None and theirs is not None and tensors is not None:
        told = (f"load_model {tensors:.3f} s, from_pretrained {ours:.3f} s, "
                f"transformers {theirs:.3f} s")
    return [
        ("0.6B warm: at most 45 ms",
         *at_most(median_of(found, "penstock", "warm"), 0.045, milliseconds)),
        ("0.6B warm: ahead of every peer's best", *against(found, "warm", 1.0)),
        ("0.6B cold: no slower than the fastest peer", *against(found, "cold", 1.0)),
        ("0.6B from process start: 120 ms beyond a bare context",
         *at_most(late, 0.120, lambda v: f"{v * 1e3:.0f} ms ({ready:.3f} s, {context:.3f} s)")),
        ("0.6B after import torch (told, no target)", told, None),
        ("import penstock: under 50 ms",
         *at_most(mark("penstock", "import_penstock"), 0.050, milliseconds)),
    ] + memory(found, "0.6B")


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    targets: list[Target] = []
    for name, check in (("7b", large), ("0.6b", small)):
        file = folder / f"compare-{name}.json"
        if file.exists():
            targets += check(json.loads(file.read_text(encoding="utf-8")))
        else:
            print(f"{file} is not there; the targets for {name} are left out")
    if not targets:
        return 1
    width = max(len(target) for target, _, _ in targets)
    words = {True: "met", False: "NOT MET", None: "-"}
    for target, measured, met in targets:
        print(f"{words[met]:8} {target:{width}}  {measured}")
    verdicts = [met for *_, met in targets]
    print(f"{verdicts.count(True)} met, {verdicts.count(False)} not met, "
          f"{verdicts.count(None)} without a verdict")
    return 0


if __name__ == "__main__":
    sys.exit(main())
