# SPDX-License-Identifier: MIT
"""What came out: as one dictionary for programs, and as a table, words and a picture for people."""
from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any, Iterable

from .._error import shown
from .schedule import Row, Schedule
from .states import BY_STATE, STATES, USUAL

BASE = "transformers"
US = "penstock"
# Rows of Penstock's own, which are no peers of it.
OURS = ("penstock", "penstock-pretrained")
MIB = 1 << 20


def spread(values: Iterable[float]) -> dict[str, Any] | None:
    """Median, least and most; None for no values."""
    values = list(values)
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values),
            "runs": len(values)}


def machine() -> dict[str, Any]:
    model = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": model or platform.processor(), "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory, "kernel": platform.release(),
            "python": platform.python_version()}


def row_result(row: Row, tensor_bytes: int) -> dict[str, Any]:
    states = {}
    for state in BY_STATE:
        runs = [run for run in row.runs if run["state"] == state]
        if runs:
            seconds = spread(run["seconds"] for run in runs)
            states[state] = {"seconds": seconds,
                             "cpu_seconds": spread(run["cpu_seconds"] for run in runs),
                             "gb_per_s": tensor_bytes / seconds["median"] / 1e9}
    memory = None
    if row.memory:
        memory = {"host_bytes": row.memory["held"], "anonymous_bytes": row.memory["RssAnon"],
                  "driver_bytes": row.memory["driver"], "mapped_file_bytes": row.memory["RssFile"],
                  "locked_bytes": row.memory.get("VmLck", 0) + row.memory.get("VmPin", 0),
                  "system_bytes": row.memory["system"], "gpu_extra_bytes": None,
                  "pinned_bytes": None}
        if "gpu" in row.memory:
            memory["gpu_extra_bytes"] = row.memory["gpu"] - row.memory["tensors"]
        if row.memory.get("report"):
            memory["pinned_bytes"] = row.memory["report"].get("pinned_bytes")
    return {"name": row.loader.name, "label": row.loader.label, "setting": row.loader.setting,
            "version": row.version, "status": row.status, "reason": row.reason, "states": states,
            "memory": memory, "left_out": row.left_out, "runs": row.runs}


def best_median(rows: list[dict]) -> dict[str, Any] | None:
    """The geometry with the best median: a ceiling that one lucky run cannot lift."""
    rates: dict[tuple, list[float]] = {}
    for row in rows:
        rates.setdefault((row.get("threads"), row["request"]), []).append(row["gb_per_s"])
    return max(map(spread, rates.values()), key=lambda entry: entry["median"], default=None)


def ceilings_result(schedule: Schedule) -> dict[str, Any]:
    found = schedule.ceilings
    return {"copy_gb_per_s": best_median(found["copy"]),
            "disk_gb_per_s": best_median([row for row in found["disk"] if row["whole"]]),
            "cache_gb_per_s": best_median(found["cache"]), "measured": found}


def startup_result(runs: dict[str, list[dict]]) -> dict[str, Any]:
    result = {}
    for kind, answers in runs.items():
        good = [answer["marks"] for answer in answers if answer["status"] == "ok"]
        if not good:
            result[kind] = {"status": answers[-1]["status"], "reason": answers[-1]["reason"]}
            continue
        entry = {"status": "ok", "ready": spread(marks["ready"] for marks in good)}
        if "import torch" in good[0]:
            entry["after_import_torch"] = spread(marks["ready"] - marks["import torch"]
                                                 for marks in good)
        if "import penstock" in good[0]:
            entry["import_penstock"] = spread(marks["import penstock"] - marks["python"]
                                              for marks in good)
        result[kind] = entry
    return result


def result(schedule: Schedule) -> dict[str, Any]:
    """Everything, as one dictionary: what --json gives."""
    model = schedule.model
    tensor_bytes = model.tensor_bytes
    loaders = [row_result(row, tensor_bytes) for row in schedule.rows]
    base = next((row for row in loaders if row["name"] == BASE), None)
    for row in loaders:
        for state, entry in row["states"].items():
            entry["speed_up"] = None
            if base and state in base["states"]:
                entry["speed_up"] = (base["states"][state]["seconds"]["median"]
                                     / entry["seconds"]["median"])
    found = {"format": 1, "machine": machine(), "device": schedule.options.device,
             "model": {"path": model.path, "files": len(model.files),
                       "file_bytes": model.file_bytes, "tensors": len(model.tensors),
                       "tensor_bytes": tensor_bytes},
             "states": schedule.options.states, "rounds": schedule.options.rounds,
             "loaders": loaders, "ceilings": ceilings_result(schedule),
             "startup": startup_result(schedule.startup) or None,
             "tensor_parallel": schedule.tensor_parallel, "notes": schedule.notes,
             "phases": schedule.phases}
    found["shares"] = shares(found)
    found["conclusion"] = conclusion(found)
    return found


def find(found: dict, name: str) -> dict | None:
    return next((row for row in found["loaders"] if row["name"] == name), None)


def median_of(row: dict | None, state: str) -> float | None:
    if not row or row["status"] == "wrong" or state not in row["states"]:
        return None
    return row["states"][state]["seconds"]["median"]


def shares(found: dict) -> dict[str, float | None]:
    """Penstock's rate as a share of the ceiling: warm of the copies, cold of the disk; on the CPU
    warm of the reads from the page cache."""
    rows = find(found, US)
    warm = "copy_gb_per_s" if found["device"].startswith("cuda") else "cache_gb_per_s"
    result: dict[str, float | None] = {}
    for state, key in (("warm", warm), ("cold", "disk_gb_per_s")):
        ceiling, mine = found["ceilings"][key], median_of(rows, state)
        result[state] = None
        if ceiling and mine:
            result[state] = found["model"]["tensor_bytes"] / mine / 1e9 / ceiling["median"]
    return result


# ---------------------------------------------------------------------------------- for people

def size_text(count: float | None) -> str:
    if count is None:
        return "-"
    if abs(count) >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB"


def seconds_text(entry: dict | None) -> str:
    if not entry:
        return "-"
    seconds = entry["seconds"]
    text = f"{seconds['median']:.3f}"
    if seconds["runs"] > 1:
        text += f" ({seconds['min']:.3f}-{seconds['max']:.3f})"
    return text


def label_of(row: dict) -> str:
    return row["label"] if row["setting"] == "none" else f"{row['label']}, {row['setting']}"


def table(found: dict) -> str:
    """The loaders, one line each; those that gave nothing have their reason instead."""
    states = [state for state in BY_STATE if state in found["states"]]
    head = ["loader", "setting", "version"]
    for state in states:
        head += [f"{state} s", "x"]
    cuda = found["device"].startswith("cuda")
    head += [f"CPU-s {states[0]}"] + (["CPU memory", "GPU memory +"] if cuda else
                                      ["memory with the tensors"])
    lines, reasons = [head], []
    for row in found["loaders"]:
        cells = [row["label"], row["setting"], row["version"]]
        for state in states:
            entry = row["states"].get(state)
            speed_up = entry and entry["speed_up"]
            cells += [seconds_text(entry), f"{speed_up:.1f}" if speed_up else "-"]
        first = row["states"].get(states[0])
        memory = row["memory"] or {}
        cells += [f"{first['cpu_seconds']['median']:.2f}" if first else "-",
                  size_text(memory.get("host_bytes"))]
        cells += [size_text(memory.get("gpu_extra_bytes"))] if cuda else []
        if row["states"] and row["status"] != "wrong":
            lines.append(cells)
        if row["status"] != "ok":
            reasons.append(f"  {label_of(row)}: {row['status']} - {row['reason']}")
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = []
    for line in lines:
        cells = [cell.ljust(width) if column < 3 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(line, widths))]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    if reasons:
        text += ["", "not measured, or not in every state:"] + reasons
    return "\n".join(text)


def ceilings_text(found: dict) -> list[str]:
    names = (("copy_gb_per_s", "pinned host memory to the GPU"),
             ("disk_gb_per_s", "files read with O_DIRECT, huge pages"),
             ("cache_gb_per_s", "page cache to host memory"))
    lines = []
    for key, words in names:
        entry = found["ceilings"][key]
        if entry:
            lines.append(f"  {words}: {entry['median']:.2f} GB/s "
                         f"({entry['min']:.2f}-{entry['max']:.2f})")
    return ["ceilings, measured in the same run:"] + lines if lines else []


def startup_text(found: dict) -> list[str]:
    if not found["startup"]:
        return []
    words = {"context": "a bare CUDA context", "penstock": "Penstock, without torch",
             "torch": "import torch and a context",
             "penstock-torch": "Penstock: prefetch, import torch, load_model",
             "penstock-pretrained": "Penstock: prefetch, import torch, from_pretrained",
             "transformers": "transformers: import torch, from_pretrained"}
    lines = ["from process start to usable weights (warm):"]
    for kind, entry in found["startup"].items():
        if entry["status"] != "ok":
            lines.append(f"  {words[kind]}: {entry['status']} - {entry['reason']}")
            continue
        line = f"  {words[kind]}: {entry['ready']['median']:.3f} s"
        if "after_import_torch" in entry:
            line += f", {entry['after_import_torch']['median']:.3f} s of it after import torch"
        lines.append(line)
    return lines


def phases_text(phases: dict[str, float]) -> str:
    """How long everything took, and what it was spent on."""
    parts = [f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= 0.05]
    return f"took {sum(phases.values()):.1f} s: {', '.join(parts)}"


def text(found: dict) -> str:
    """Everything that is printed for people."""
    model, device = found["model"], found["device"]
    usable = "usable" if device.startswith("cuda") else "read, every page of it"
    lines = [f"{shown(model['path'])}: {model['tensors']} tensors, "
             f"{size_text(model['tensor_bytes'])} in {model['files']} "
             f"file{'s' * (model['files'] != 1)}, to {device}",
             f"seconds from a ready device to the last tensor {usable}: median (least-most); "
             "x: times faster than transformers"]
    lines += [f"{state.name}: {state.what}" for state in STATES
              if state.name in found["states"] and state.name not in USUAL]
    lines += ["", table(found), ""]
    for part in (ceilings_text(found), startup_text(found)):
        if part:
            lines += part + [""]
    lines += found["conclusion"]
    lines += [f"note: {note}" for note in found["notes"]]
    left = [f"{label_of(row)} {state} {count} time{'s' * (count != 1)}"
            for row in found["loaders"] for state in BY_STATE
            if (count := sum(run["state"] == state for run in row["left_out"]))]
    if left:
        lines.append("left out for lack of time: " + "; ".join(left))
    lines.append(phases_text(found["phases"]))
    return "\n".join(lines)


def conclusion(found: dict) -> list[str]:
    """Who is ahead, by how much, and how far from what the machine can do."""
    lines = []
    for state in BY_STATE:
        times = sorted((time, row["name"], label_of(row)) for row in found["loaders"]
                       if (time := median_of(row, state)) is not None)
        if not times:
            continue
        best, _, label = times[0]
        rate = found["model"]["tensor_bytes"] / best / 1e9
        line = f"{state}: {label} is fastest with {best:.3f} s ({rate:.1f} GB/s)."
        mine = median_of(find(found, US), state)
        peers = [entry for entry in times if entry[1] not in OURS]
        if mine and peers:
            peer, _, peer_label = peers[0]
            # How much longer the slower of the two takes, in either direction.
            gap = (max(peer, mine) / min(peer, mine) - 1) * 100
            where = "level with" if gap < 0.5 else "ahead of" if mine < peer else "behind"
            by = "" if gap < 0.5 else f" by {gap:.0f} %"
            line += f" Penstock is {where} the fastest other, {peer_label}{by}"
            share = found["shares"].get(state)
            line += f", at {share:.0%} of the ceiling." if share else "."
        lines.append(line)
    tp = found["tensor_parallel"]
    if tp:
        if tp["status"] == "ok":
            share = tp["storage_bytes"] / tp["file_bytes"]
            lines.append(f"half of each tensor (two ranks): {size_text(tp['storage_bytes'])} read "
                         f"for {size_text(tp['bytes'])}, {share:.1%} of the files.")
        else:
            lines.append(f"half of each tensor: {tp['status']} - {tp['reason']}")
    if not lines:
        lines.append("nothing could be measured; the reasons are above.")
    return lines


# ---------------------------------------------------------------------------------- the picture

def plot_check() -> str:
    """Why there can be no picture; empty if there can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"--plot needs matplotlib ({error}); install it with `pip install matplotlib`"
    return ""


def plot(found: dict, path: str) -> None:
    """A bar for each loader, one panel for each state."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    states = [state for state in BY_STATE
              if any(median_of(row, state) for row in found["loaders"])]
    count = max(1, len(states))
    rows = max(3, len(found["loaders"]))
    figure, axes = pyplot.subplots(1, count, figsize=(1 + 5 * count, 1.2 + 0.32 * rows),
                                   squeeze=False)
    for state, axis in zip(states, axes[0]):
        times = sorted((time, label_of(row), row["name"], row["states"][state]["seconds"])
                       for row in found["loaders"] if (time := median_of(row, state)))[::-1]
        colours = ["tab:orange" if name in OURS else "tab:gray" for _, _, name, _ in times]
        error = [[time - seconds["min"] for time, _, _, seconds in times],
                 [seconds["max"] - time for time, _, _, seconds in times]]
        bars = axis.barh([label for _, label, _, _ in times], [time for time, *_ in times],
                         color=colours, xerr=error)
        axis.bar_label(bars, [f" {time:.3g}" for time, *_ in times], label_type="edge", fontsize=8)
        axis.set_title(state)
        axis.set_xlabel("seconds to the last tensor")
        axis.margins(x=0.15)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"{Path(found['model']['path']).name}, "
                    f"{size_text(found['model']['tensor_bytes'])}, to {found['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
