# SPDX-License-Identifier: MIT
"""Starts workers, one after the other, and never waits for one that hangs.

A Runner starts each job in a fresh process, or, with `fork`, in a process forked from a server that
has torch imported. Either way a process does one job and ends. A job that outlives its time is
killed with everything it started.
"""
from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WORKER = Path(__file__).resolve().parent / "worker.py"
PACKAGES = WORKER.parents[2]
STARTUP = WORKER.with_name("startup.py")
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1",
         "HF_HUB_DISABLE_PROGRESS_BARS": "1", "RUNAI_STREAMER_LOG_LEVEL": "WARNING",
         "TOKENIZERS_PARALLELISM": "false"}


class Runner:
    def __init__(self, paths: dict[str, list[str]], fork: bool, log: Path | None) -> None:
        """`paths`: folders put first in sys.path, by loader; the word before a loader's first dash
        stands for its whole family, and "" for every loader."""
        self.paths = paths
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-compare-")
        self.log = open(log or Path(self.folder.name) / "log", "a+", encoding="utf-8",
                        errors="replace")
        self.fork = fork
        self.server: subprocess.Popen | None = None
        self.child: int | None = None
        self.replies: queue.Queue[str] = queue.Queue()
        self.count = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_server()
        self.log.close()
        self.folder.cleanup()

    def file(self, name: str) -> str:
        return str(Path(self.folder.name) / name)

    def environment(self) -> dict[str, str]:
        env = {**QUIET, **os.environ}
        # Wheels unpacked by --target have libraries that other libraries look for by name.
        libraries = [str(found) for folders in self.paths.values() for folder in folders
                     for found in sorted(Path(folder).glob("*/lib64"))]
        if libraries:
            env["LD_LIBRARY_PATH"] = ":".join(libraries + [env.get("LD_LIBRARY_PATH", "")])
        # The workers find the Penstock that this is a part of.
        if PACKAGES.name not in ("site-packages", "dist-packages"):
            env["PYTHONPATH"] = ":".join(filter(None, [str(PACKAGES), env.get("PYTHONPATH")]))
        return env

    def path_of(self, loader: str) -> list[str]:
        family = loader.partition("-")[0]
        return [folder for name in dict.fromkeys((loader, family, ""))
                for folder in self.paths.get(name, [])]

    def run(self, job: dict, timeout: float, loader: str = "") -> dict:
        """Do a job; its answer, with "wall" seconds, or one with status "timeout" or "died"."""
        self.count += 1
        answer = Path(self.file(f"answer-{self.count}"))
        job = {**job, "answer": str(answer), "path": self.path_of(loader)}
        self.log.write(f"--- {job['kind']} {loader} {job.get('state', '')}\n")
        self.log.flush()
        mark = self.log.seek(0, os.SEEK_END)
        start = time.monotonic()
        status = (self.run_forked if self.fork else self.run_fresh)(job, timeout)
        wall = time.monotonic() - start
        if status is None:
            reason = f"it had not finished after {timeout:.0f} s and was stopped"
            return {"status": "timeout", "reason": reason, "wall": wall}
        if not answer.exists():
            return {"status": "died", "reason": self.death(status, mark), "wall": wall}
        found = json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink()
        return {**found, "wall": wall}

    def death(self, status: int, mark: int) -> str:
        self.log.seek(mark)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        self.log.seek(0, os.SEEK_END)
        how = f"it died by {signal.Signals(-status).name}" if status < 0 else \
            f"it ended with status {status}"
        return f"{how}: {lines[-1][:200]}" if lines else how

    def run_fresh(self, job: dict, timeout: float) -> int | None:
        process = subprocess.Popen([sys.executable, "-P", str(WORKER), json.dumps(job)],
                                   stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                                   env=self.environment(), start_new_session=True)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                kill_group(process.pid)
                process.wait()

    def run_forked(self, job: dict, timeout: float) -> int | None:
        if self.server is None or self.server.poll() is not None:
            self.start_server()
        assert self.server and self.server.stdin
        try:
            self.server.stdin.write(json.dumps(job) + "\n")
            self.server.stdin.flush()
        except BrokenPipeError:
            return 1
        # The first job waits until the server has imported torch.
        self.child = self.reply(timeout + 120)
        if self.child is None:
            self.stop_server()
            return 1
        status = self.reply(timeout)
        if status is None:
            kill_group(self.child)
            if self.reply(60) is None:
                self.stop_server()
        self.child = None
        return status

    def reply(self, timeout: float) -> int | None:
        try:
            line = self.replies.get(timeout=timeout)
        except queue.Empty:
            return None
        return int(line) if line else None

    def start_server(self) -> None:
        self.replies = queue.Queue()
        self.server = subprocess.Popen([sys.executable, "-P", str(WORKER), "--serve"], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=self.log, env=self.environment(),
                                       start_new_session=True)

        def listen(lines, replies: queue.Queue) -> None:
            for line in lines:
                replies.put(line.strip())
            replies.put("")

        threading.Thread(target=listen, args=(self.server.stdout, self.replies),
                         daemon=True).start()

    def stop_server(self) -> None:
        if self.server is not None:
            if self.child is not None:
                kill_group(self.child)
                self.child = None
            kill_group(self.server.pid)
            self.server.wait()
            self.server = None

    def startup(self, kind: str, model: str, device: str, timeout: float) -> dict:
        """Run startup.py; its marks, or status and reason."""
        command = [sys.executable, "-P", str(STARTUP), kind, "", model, device]
        env = self.environment()
        mark = self.log.seek(0, os.SEEK_END)
        command[4] = repr(time.monotonic())
        try:
            done = subprocess.run(command, env=env, text=True, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=self.log, timeout=timeout,
                                  check=False)
        except subprocess.TimeoutExpired:
            return {"status": "timeout", "reason": f"not finished after {timeout:.0f} s"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("startup ")]
        if done.returncode or not lines:
            return {"status": "failed", "reason": self.death(done.returncode, mark)}
        return {"status": "ok", "marks": json.loads(lines[-1].partition(" ")[2])}


def kill_group(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
