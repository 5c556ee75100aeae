# SPDX-License-Identifier: MIT
"""Saves whose memory may change before they are durable: Saving.wait_gathered()."""
import ctypes
import os
import weakref

import pytest
import torch

import penstock
from penstock import _penstock as engine

PICKLE = b"\x80\x02N."


class Owner:
    """Memory that somebody owns, to see when it is let go of."""

    def __init__(self, content):
        self.memory = ctypes.create_string_buffer(content, len(content))

    def storage(self):
        return (ctypes.addressof(self.memory), len(self.memory), engine.Device("host"))


def start(path, *owners, **options):
    return engine.torch_save(path, engine.Device("host"), [("data.pkl", PICKLE)],
                             [owner.storage() for owner in owners], list(owners), **options)


def stored(path, name="data/0"):
    return torch._C.PyTorchFileReader(os.fspath(path)).get_record(name)


def test_what_changes_after_it_was_gathered_is_saved_as_it_was(tmp_path):
    owner = Owner(b"old" * 500_000)
    job = start(tmp_path / "a.pt", owner, gather=True)
    job.wait_gathered()
    ctypes.memset(owner.memory, 0xEE, len(owner.memory))
    report = job.wait()
    assert stored(tmp_path / "a.pt") == b"old" * 500_000
    assert report["gathering"] == "ahead"
    assert 0 < report["gathered_seconds"] <= report["stored_seconds"] <= report["seconds"]


def test_auto_takes_memory_for_all_of_it_and_keeps_that(tmp_path):
    owner = Owner(bytes(180 << 20))
    reports = []
    for _ in range(2):
        job = start(tmp_path / "a.pt", owner, gather=True, memory_limit="auto")
        job.wait_gathered()
        reports.append(job.wait())
    engine.trim()
    assert [report["gathering"] for report in reports] == ["ahead", "ahead"]
    assert reports[1]["made_bytes"] <= reports[0]["made_bytes"] // 2
    with pytest.raises(TypeError):
        start(tmp_path / "a.pt", owner, memory_limit="plenty")


def test_memory_is_let_go_of_when_it_is_gathered(tmp_path):
    owner = Owner(b"x" * 100_000)
    gone = weakref.ref(owner)
    job = start(tmp_path / "a.pt", owner, gather=True)
    del owner
    assert gone()
    job.wait_gathered()
    assert not gone()
    job.wait_gathered()
    job.wait()
    assert stored(tmp_path / "a.pt") == b"x" * 100_000


def test_who_did_not_ask_waits_until_all_is_written(tmp_path):
    job = start(tmp_path / "a.pt", Owner(b"x" * 100_000))
    job.wait_gathered()
    assert job.wait_for(0)
    report = job.wait()
    assert report["gathering"] == "" and report["gathered_seconds"] == 0


def test_a_save_that_fails_tells_who_waits_for_the_memory(tmp_path):
    owner = Owner(bytes(8 << 20))
    job = start(tmp_path / "a.pt", owner, gather=True, memory_limit=128 << 10)
    job.cancel()
    with pytest.raises(penstock.Error, match="cancelled"):
        job.wait_gathered()
    with pytest.raises(ValueError, match="waited for already"):
        job.wait()
    assert not (tmp_path / "a.pt").exists()


def test_a_safetensors_save_is_gathered_when_it_is_written(tmp_path):
    tensor = torch.arange(1000)
    job = engine.save_safetensors(tmp_path / "a.safetensors",
                                  [("t", 8, (1000,), tensor.data_ptr(), engine.Device("host"))],
                                  None, 0, 0, [], tensor, 0, 1 << 20)
    job.wait_gathered()
    job.wait()
    assert (tmp_path / "a.safetensors").stat().st_size > 1000
