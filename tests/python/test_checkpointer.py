# SPDX-License-Identifier: MIT
"""Checkpointer: what save() promises, what restore() fills, and what is told when it goes wrong."""
import errno
import json
import os
import random
import shutil
import signal
import textwrap
import threading
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy
import pytest
import torch

import penstock
from penstock import Checkpointer, _checkpointer, _penstock, _torch_load
from penstock._state import Filling
from support import MIB, Talk, python, same
from torch_objects import alike


@pytest.fixture
def ckpt(tmp_path):
    with Checkpointer(tmp_path / "ckpt") as made:
        yield made


def saved(ckpt, step, state, **more):
    """Save, and wait until it is done."""
    report = ckpt.save(step, state, **more)
    ckpt.wait()
    return report


def file_of(ckpt, step) -> Path:
    return Path(ckpt.path(step), ckpt.show(step)["files"][0]["name"])


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32),
                               torch.nn.Dropout(0.5), torch.nn.Linear(32, 4))


class Training:
    """A small training whose every number depends on all of its state."""

    def __init__(self, seed):
        self.model = net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.state = {"model": self.model, "optimizer": self.optimizer,
                      "scheduler": self.scheduler, "random": penstock.RandomState(), "step": 0,
                      "losses": []}

    def run(self, steps):
        for _ in range(steps):
            noise = float(numpy.random.random()) + random.random()
            loss = (self.model(torch.randn(8, 16) + noise) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.state["step"] += 1
            self.state["losses"].append(loss.item())


def damage(path, at=-8000):
    """Turn over one byte, of a storage."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------------------------------- saving --

def test_a_step_is_a_file_that_torch_opens_and_a_manifest(ckpt):
    state = {"model": net(), "list": [torch.arange(5), (1, "two", None)], "epoch": 3}
    saved(ckpt, 1200, state, user={"loss": 0.5})
    folder = Path(ckpt.path(1200))
    assert folder.name == "step-00001200"
    assert sorted(os.listdir(folder)) == ["manifest.json", "rank-00000.pt"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 1200 and manifest["user"] == {"loss": 0.5}
    assert alike(torch.load(folder / "rank-00000.pt"),
                 dict(state, model=state["model"].state_dict()))


def test_what_changes_after_save_returned_is_saved_as_it_was(ckpt):
    state = {f"t{i}": torch.full((MIB,), float(i)) for i in range(8)}
    state["plain"] = [1, 2]
    report = ckpt.save(1, state)
    for tensor in list(state.values())[:-1]:
        tensor.fill_(-1)
    state["plain"].append(3)
    ckpt.wait()
    found = torch.load(file_of(ckpt, 1))
    assert all((found[f"t{i}"] == i).all() for i in range(8)) and found["plain"] == [1, 2]
    assert report.done and report.bytes == 32 * MIB and report.transfer.gathering == "ahead"
    assert "found room in host memory" in str(report)


def test_a_small_limit_streams_and_says_so(tmp_path):
    with Checkpointer(tmp_path, memory_limit=4 * MIB) as ckpt:
        state = [torch.full((4 * MIB,), 7.0)]
        report = ckpt.save(1, state)
        state[0].fill_(-1)
        ckpt.wait()
        assert (torch.load(file_of(ckpt, 1))[0] == 7).all()
    assert report.transfer.pinned_bytes <= 4 * MIB
    assert report.transfer.gathering == "streamed" and "waited for the store" in report.stall_reason


def test_a_device_copy_lets_the_state_change_at_once(tmp_path):
    base = torch.arange(1000.0)
    state = {"a": base, "view": base[10:20], "turned": base.view(10, 100).t()}
    with Checkpointer(tmp_path, snapshot="device") as ckpt:
        report = ckpt.save(1, state)
        base.zero_()
        ckpt.wait()
        found = ckpt.restore()
    assert report.bytes == 4000 and report.snapshot == "device"
    assert report.stall_reason == "the state was copied on its device"
    assert torch.equal(found["view"], torch.arange(10.0, 20))
    assert found["a"].data_ptr() == found["turned"].data_ptr() == found["view"].data_ptr() - 40


class Elsewhere:
    """A storage that says it is on a GPU."""

    def __init__(self, size):
        self.size = size

    def nbytes(self):
        return self.size

    def clone(self):
        raise torch.OutOfMemoryError("no more")


@pytest.mark.parametrize("free, words", [(100, "cuda:0 has room for 150 bytes, .* has 200"),
                                         (200, "a device is full: no more")])
def test_a_device_copy_without_room_is_refused(monkeypatch, free, words):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    with pytest.raises(penstock.Error, match=words) as error:
        _checkpointer._copies(torch, [(Elsewhere(120), "cuda:0"), (Elsewhere(80), "cuda:0")], 0)
    assert error.value.errno == errno.ENOMEM and 'snapshot="host"' in error.value.hint


@pytest.mark.parametrize("limit", [MIB + _checkpointer._LEAST_MEMORY, "auto"])
def test_a_device_copy_of_tensors_on_the_host_keeps_to_the_limit(tmp_path, monkeypatch, limit):
    if limit == "auto":
        monkeypatch.setattr(_penstock, "memory_available", lambda: 2 * MIB)
    with Checkpointer(tmp_path, snapshot="device", memory_limit=limit) as ckpt:
        report = saved(ckpt, 1, [torch.ones(MIB // 4)])
        assert limit == "auto" or report.transfer.pinned_bytes <= limit - MIB
        with pytest.raises(penstock.Error, match=f"room for {MIB} bytes.* {MIB + 4}") as error:
            ckpt.save(2, [torch.ones(MIB // 4), torch.ones(1)])
        assert error.value.errno == errno.ENOMEM and 'snapshot="host"' in error.value.hint
        assert ckpt.steps() == [1]


def test_only_the_last_steps_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep=2) as ckpt:
        for step in (5, 7, 9):
            report = saved(ckpt, step, [torch.ones(3) * step])
        assert ckpt.steps() == [7, 9] and ckpt.latest() == 9 and report.removed == [5]
        assert ckpt.restore(7)[0].tolist() == [7, 7, 7]
    with Checkpointer(tmp_path, keep=None) as ckpt:
        saved(ckpt, 10, [])
        assert ckpt.steps() == [7, 9, 10]


def test_a_step_that_keep_would_remove_at_once_is_refused(tmp_path):
    with Checkpointer(tmp_path, keep=2) as ckpt:
        for step in (50, 60, 70):
            saved(ckpt, step, [step])
        with pytest.raises(penstock.Error, match="2 later ones, up to 70.*another folder"):
            ckpt.save(5, [5])
        assert ckpt.steps() == [60, 70] and not os.path.exists(ckpt.path(5))
        assert saved(ckpt, 65, [65]).removed == [60] and ckpt.restore(65) == [65]
    with Checkpointer(tmp_path, keep=3) as ckpt:
        saved(ckpt, 5, [5])
        assert ckpt.steps() == [5, 65, 70]


def test_a_step_that_exists_is_refused_or_replaced_as_a_whole(ckpt):
    saved(ckpt, 3, {"a": torch.zeros(2)})
    with pytest.raises(FileExistsError, match="step 3 exists"):
        ckpt.save(3, {"a": torch.ones(2)})
    assert ckpt.restore(3)["a"].tolist() == [0, 0]
    saved(ckpt, 3, {"a": torch.ones(2)}, overwrite=True)
    assert ckpt.restore(3)["a"].tolist() == [1, 1]
    assert len(os.listdir(ckpt.path(3))) == 2


def test_a_second_save_waits_for_the_first(ckpt, monkeypatch):
    go, entered = threading.Event(), threading.Event()
    store = Checkpointer._store

    def held(self, save):
        entered.set()
        go.wait(60)
        return store(self, save)

    monkeypatch.setattr(Checkpointer, "_store", held)
    first = ckpt.save(1, [1])
    entered.wait(60)
    assert not first.done and ckpt.latest() is None
    threading.Timer(0.2, go.set).start()
    second = ckpt.save(2, [2])
    assert first.done and 0 < second.waited_seconds <= second.stall_seconds
    ckpt.wait()
    assert ckpt.steps() == [1, 2]


def test_the_least_memory_is_enough(tmp_path):
    with Checkpointer(tmp_path, memory_limit=131072) as ckpt:
        saved(ckpt, 1, {"a": torch.arange(300_000)})
        assert ckpt.restore()["a"].equal(torch.arange(300_000))


def test_what_cannot_be_pickled_saves_nothing_and_training_goes_on(ckpt):
    with pytest.raises((AttributeError, TypeError)):
        ckpt.save(1, {"lock": threading.Lock()})
    ckpt.wait()
    assert ckpt.steps() == [] and not os.path.exists(ckpt.path(1))
    saved(ckpt, 1, {"a": 1})
    assert ckpt.latest() == 1


def test_ten_thousand_tensors_find_room(ckpt):
    report = saved(ckpt, 1, {f"t{i}": torch.full((i % 300,), i) for i in range(10_000)})
    assert report.transfer.gathering == "ahead"
    assert ckpt.restore()["t9999"].tolist() == [9999] * 99


@pytest.mark.parametrize("arguments, words", [
    ({"snapshot": "tape"}, "snapshot"), ({"keep": 0}, "keep"), ({"keep": 2.5}, "keep"),
    ({"keep": 2**32}, "keep"), ({"timeout": 0}, "timeout"), ({"timeout": "long"}, "timeout"),
    ({"timeout": float("inf")}, "timeout"),
    ({"memory_limit": "much"}, "memory_limit"), ({"memory_limit": -1}, "memory_limit"),
    ({"memory_limit": 65536}, "at least 131072"),
    ({"transfer": "no"}, "no such type")])
def test_arguments_that_make_no_sense(tmp_path, arguments, words):
    with pytest.raises(penstock.Error, match=words):
        Checkpointer(tmp_path, **arguments)


@pytest.mark.parametrize("user", [{"a": float("nan")}, {"a": {1, 2}}, [1], {"a": "\ud800"}])
def test_values_that_a_manifest_cannot_hold_are_refused_at_once(ckpt, user):
    with pytest.raises(penstock.Error, match="user"):
        ckpt.save(1, [], user=user)
    saved(ckpt, 1, [], user={"a": [1, None, "x"]})
    assert ckpt.show(1)["user"] == {"a": [1, None, "x"]}


@pytest.mark.parametrize("step", [-1, "1", 1.5, True, None, 2**63, 2**64, 2**64 + 5])
def test_steps_that_are_none_are_refused_and_training_goes_on(ckpt, step):
    with pytest.raises(penstock.Error, match="cannot use step"):
        ckpt.save(step, [])
    if step is not None:
        with pytest.raises(penstock.Error, match="cannot use step"):
            ckpt.verify(step)
    saved(ckpt, 1, [])
    assert ckpt.steps() == [1]


# ------------------------------------------------------------------------------------ the folder --

def test_two_writers_are_told_apart_and_readers_are_welcome(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        saved(ckpt, 1, {"a": 1})
        with pytest.raises(penstock.Error, match=r"this process .*close\(\) the") as error:
            Checkpointer(tmp_path)
        assert error.value.errno == errno.EBUSY
        with Checkpointer(tmp_path, read_only=True) as reader:
            assert reader.restore() == {"a": 1} and reader.verify()["files"] == 1
            with pytest.raises(penstock.Error, match="read_only"):
                reader.save(2, {})
    Checkpointer(tmp_path).close()


def test_a_forked_child_has_none(ckpt):
    pid = os.fork()
    if not pid:
        try:
            ckpt.save(1, [])
        except penstock.Error as error:
            os._exit(7 if error.errno == errno.ECHILD else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    saved(ckpt, 1, [])


def test_nothing_to_restore(ckpt):
    assert ckpt.latest() is None and ckpt.steps() == []
    for call in ckpt.restore, ckpt.verify, ckpt.show, lambda: ckpt.restore(4):
        with pytest.raises(FileNotFoundError):
            call()


def test_a_step_that_there_is_not_has_no_other_in_its_place(ckpt):
    saved(ckpt, 1, [1])
    with pytest.raises(FileNotFoundError, match="99"):
        ckpt.restore(99, fallback=True)


# ------------------------------------------------------------------------------------- restoring --

def test_a_training_goes_on_as_if_nothing_had_happened(tmp_path):
    whole = Training(1)
    whole.run(6)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(6, whole.state)
        whole.run(6)
    again = Training(2)
    random.seed(99)
    numpy.random.seed(99)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(into=again.state) is again.state
    assert again.state["step"] == 6 and again.model.state_dict().keys()
    again.run(6)
    assert again.state["losses"] == whole.state["losses"] and len(whole.state["losses"]) == 12
    for mine, theirs in zip(again.model.state_dict().values(), whole.model.state_dict().values()):
        assert same(mine, theirs)
    assert alike(again.optimizer.state_dict(), whole.optimizer.state_dict())
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()


def test_tensors_are_filled_where_they_lie(ckpt, monkeypatch):
    training = Training(3)
    training.run(1)
    saved(ckpt, 1, {**training.state, "t": torch.arange(9.0)})
    addresses = [tensor.data_ptr() for tensor in training.model.state_dict().values()]
    moments = training.optimizer.state[training.model[0].weight]["exp_avg"]
    training.run(1)
    target = torch.zeros(9)
    state = {**training.state, "t": target}
    places = []
    real = _torch_load._places
    monkeypatch.setattr(_torch_load, "_places",
                        lambda *arguments: places.append(real(*arguments)) or places[0])
    ckpt.restore(into=state)
    assert len(places[0]) > 20
    assert all(place.storage.device.type == "meta" for place in places[0].values())
    assert addresses == [tensor.data_ptr() for tensor in training.model.state_dict().values()]
    assert training.optimizer.state[training.model[0].weight]["exp_avg"].data_ptr() \
        == moments.data_ptr()
    assert state["t"] is target and target.tolist() == list(range(9))


def test_generators_made_by_hand_draw_on_from_where_they_were(ckpt):
    own = torch.Generator().manual_seed(5)
    torch.rand(3, generator=own)
    saved(ckpt, 1, {"seeds": [own], "a": torch.ones(2)})
    expected = torch.rand(4, generator=own)
    other = torch.Generator()
    state = {"seeds": [other], "a": torch.zeros(2)}
    assert ckpt.restore(into=state)["seeds"][0] is other
    assert torch.equal(torch.rand(4, generator=other), expected)
    assert ckpt.restore()["seeds"][0].dtype == torch.uint8
    saved(ckpt, 2, {"seeds": [7], "a": torch.ones(2)})
    with pytest.raises(ValueError, match="seeds.0 was saved as a int, and is a generator"):
        ckpt.restore(into=state)


class Sampler:
    """An object of the user's own, which is pickled with a generator in it."""

    def __init__(self):
        self.generator = torch.Generator()


def test_an_object_that_needs_its_bytes_at_once_is_told_how_it_is_restored(ckpt):
    saved(ckpt, 1, {"sampler": Sampler(), "a": torch.ones(2)})
    with pytest.raises(penstock.Error, match="without into="):
        ckpt.restore(into={"sampler": Sampler(), "a": torch.zeros(2)}, weights_only=False)
    assert isinstance(ckpt.restore(weights_only=False)["sampler"].generator, torch.Generator)


def test_a_fresh_optimizer_takes_what_was_loaded(ckpt):
    training = Training(4)
    training.run(3)
    saved(ckpt, 3, training.state)
    fresh = Training(5)
    ckpt.restore(into=fresh.state)
    assert alike(fresh.optimizer.state_dict(), training.optimizer.state_dict())
    assert fresh.optimizer.param_groups[0]["params"][0] is fresh.model[0].weight


def test_tied_and_shared_tensors(ckpt):
    class Tied(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            if tied:
                self.b.weight = self.a.weight

    base = torch.arange(12.0)
    given = Tied(True)
    saved(ckpt, 1, {"m": given, "all": base, "part": base[2:5]})
    for tied in True, False:
        state = {"m": Tied(tied), "all": torch.zeros(12), "part": torch.zeros(3)}
        ckpt.restore(into=state)
        assert torch.equal(state["m"].a.weight, given.a.weight)
        assert torch.equal(state["m"].b.weight, given.a.weight)
        assert (state["m"].b.weight is state["m"].a.weight) is tied
        assert torch.equal(state["all"], base) and torch.equal(state["part"], base[2:5])
    # Untied in the file, tied here: the last counts, as with load_state_dict().
    other = Tied(False)
    saved(ckpt, 2, {"m": other})
    state = {"m": Tied(True)}
    ckpt.restore(into=state)
    assert torch.equal(state["m"].a.weight, other.b.weight)


def test_two_records_do_not_land_in_one_place():
    """Both at once would leave a mixture of the two."""
    saved = [torch.empty(4, device="meta"), torch.empty(4, device="meta")]
    records = {tensor.untyped_storage()._cdata: (f"data/{i}", 1) for i, tensor in enumerate(saved)}
    one = torch.zeros(4)
    assert list(Filling(torch, [one, one], True).choose(saved, records)) == ["data/0"]
    assert len(Filling(torch, [one, torch.zeros(4)], True).choose(saved, records)) == 2


def test_other_dtypes_strides_and_views_are_copied_into(ckpt):
    numbers = torch.arange(24.0).view(4, 6)
    saved(ckpt, 1, {"half": numbers, "turned": numbers.clone(), "part": numbers.clone(),
                    "format": torch.arange(48.0).view(1, 2, 4, 6)})
    room = torch.zeros(5, 8)
    state = {"half": torch.zeros(4, 6, dtype=torch.float16), "turned": torch.zeros(6, 4).t(),
             "part": room[1:, 2:], "format": torch.zeros(1, 2, 4, 6).to(
                 memory_format=torch.channels_last)}
    ckpt.restore(into=state)
    assert state["half"].dtype == torch.float16 and torch.equal(state["half"].float(), numbers)
    assert torch.equal(state["turned"], numbers) and torch.equal(room[1:, 2:], numbers)
    assert room[0].sum() == 0 and room[:, :2].sum() == 0
    assert torch.equal(state["format"], torch.arange(48.0).view(1, 2, 4, 6))


Pair = namedtuple("Pair", "tensor number")


def test_containers_are_filled_in_place(ckpt):
    saved(ckpt, 1, {"l": [torch.ones(2), 5], "t": (torch.ones(3), 7), "deep": {"a": {"b": 1}},
                    "none": None, "grown": [1, 2, 3], "o": OrderedDict(x=torch.ones(1))})
    inner, grown, tensor = [torch.zeros(2), 0], [], torch.zeros(3)
    state = {"l": inner, "t": Pair(tensor, 0), "deep": {"a": {"b": 0, "c": 0}}, "none": 4,
             "grown": grown, "o": OrderedDict(x=torch.zeros(1))}
    found = ckpt.restore(into=dict(state, t=(tensor, 0)))
    assert found["l"] is inner and inner[0].tolist() == [1, 1] and inner[1] == 5
    assert found["t"][0] is tensor and found["t"][1] == 7
    assert found["grown"] is grown and grown == [1, 2, 3]
    assert found["deep"] == {"a": {"b": 1}} and found["none"] is None
    assert type(found["o"]) is OrderedDict and found["o"]["x"].tolist() == [1]


@pytest.mark.parametrize("state", [torch.arange(4.0), [torch.arange(4.0), 3],
                                   (torch.arange(4.0), 3)])
def test_states_that_are_no_dicts(ckpt, state):
    saved(ckpt, 1, state)
    empty = torch.zeros(4)
    found = ckpt.restore(into=empty if torch.is_tensor(state) else type(state)([empty, 0]))
    assert alike(found, state) and empty.tolist() == [0, 1, 2, 3]


def test_an_object_alone_is_a_state(ckpt):
    model, other = net(1), net(2)
    saved(ckpt, 1, model)
    assert ckpt.restore(into=other) is other
    assert alike(other.state_dict(), model.state_dict())


def test_strict_names_all_that_is_missing_and_unexpected_before_it_reads(ckpt):
    saved(ckpt, 1, {"m": torch.nn.Linear(2, 2), "extra": 1, "both": torch.ones(1)})
    state = {"m": torch.nn.Linear(2, 2, bias=False), "lack": torch.zeros(1),
             "both": torch.zeros(1)}
    before = state["m"].weight.clone()
    with pytest.raises(ValueError) as error:
        ckpt.restore(into=state)
    assert "does not have lack" in str(error.value)
    assert "no place for extra, m.bias" in str(error.value) or \
        "no place for m.bias, extra" in str(error.value)
    assert state["both"].tolist() == [0] and torch.equal(state["m"].weight, before)
    ckpt.restore(into=state, strict=False)
    assert state["both"].tolist() == [1] and state["lack"].tolist() == [0]
    assert not torch.equal(state["m"].weight, before)


def test_shapes_that_differ_are_refused_also_without_strict(ckpt):
    saved(ckpt, 1, {"m": torch.nn.Linear(2, 2), "t": torch.ones(3), "v": 1})
    state = {"m": torch.nn.Linear(2, 3), "t": torch.zeros(4), "v": torch.zeros(1)}
    with pytest.raises(ValueError, match="m.weight was saved with the shape .2, 2., and has .3, 2."
                       ) as error:
        ckpt.restore(into=state, strict=False)
    assert "t was saved with the shape (3,)" in str(error.value)
    assert "v was saved as a int, and is a tensor" in str(error.value)


def test_tensors_without_memory_are_refused(ckpt):
    saved(ckpt, 1, {"t": torch.ones(5), "model": net()})
    with pytest.raises(ValueError, match="no memory to fill on meta: t .to_empty"):
        ckpt.restore(into={"t": torch.empty(5, device="meta")}, strict=False)
    model = net().to("meta")
    for again in range(2):
        with pytest.raises(ValueError, match="on meta: model.0.weight, .* and 1 more"):
            ckpt.restore(into={"t": torch.zeros(5), "model": model})
        model.register_load_state_dict_pre_hook(lambda *unused: None)


def test_hooks_that_rename_are_heeded(ckpt):
    saved(ckpt, 1, {"m": OrderedDict(old=torch.ones(2, 2))})
    model = torch.nn.Linear(2, 2, bias=False)

    def rename(state, prefix, *_):
        state[prefix + "weight"] = state.pop(prefix + "old")

    model._register_load_state_dict_pre_hook(rename)
    ckpt.restore(into={"m": model})
    assert model.weight.tolist() == [[1, 1], [1, 1]]


class Thing:
    """What torch's restricted unpickler does not know."""

    def __eq__(self, other):
        return isinstance(other, Thing)


def test_objects_of_the_users_own_need_trust(ckpt):
    saved(ckpt, 1, {"thing": Thing(), "t": torch.ones(2)})
    with pytest.raises(Exception, match="weights_only"):
        ckpt.restore(fallback=True)
    assert ckpt.restore(weights_only=False)["thing"] == Thing()


# ---------------------------------------------------------------------------------------- damage --

def test_damage_is_named_and_the_step_before_is_taken_when_asked(ckpt):
    for step in (1, 2, 3):
        saved(ckpt, step, {"weight": torch.full((5000,), float(step))})
    damage(file_of(ckpt, 3))
    for call in (ckpt.restore, lambda: ckpt.restore(into={"weight": torch.zeros(5000)}),
                 ckpt.verify):
        with pytest.raises(penstock.Error, match="rank-00000.pt") as error:
            call()
        assert "weight" in str(error.value) and error.value.offset is not None
    into = {"weight": torch.zeros(5000)}
    with pytest.warns(UserWarning, match="step 2 is taken, since 3 is damaged"):
        ckpt.restore(into=into, fallback=True)
    assert (into["weight"] == 2).all()
    report = ckpt.report()
    assert report.step == 2 and report.skipped[0][0] == 3 and "not step 3" in str(report)
    assert report.as_dict()["transfer"]["digested_bytes"] == 20000
    damage(file_of(ckpt, 2))
    damage(file_of(ckpt, 1))
    with warnings.catch_warnings(), pytest.raises(penstock.Error, match="step-00000001"):
        warnings.simplefilter("ignore")
        ckpt.restore(fallback=True)


def test_bytes_of_a_damaged_step_do_not_stay_beside_those_of_the_step_before(ckpt):
    state = {"a": torch.ones(5000), "b": {"c": torch.ones(5000)}}
    saved(ckpt, 1, {"a": state["a"]})
    saved(ckpt, 2, state)
    damage(file_of(ckpt, 2))
    with pytest.warns(UserWarning, match="step 1 is taken"), pytest.raises(
            ValueError, match="does not have b.c, and the damaged one .* by its number"):
        ckpt.restore(into=state, strict=False, fallback=True)
    # What the damaged one would not have filled is as it was.
    state = {"a": torch.zeros(5000), "d": torch.zeros(3)}
    with pytest.warns(UserWarning, match="step 1 is taken"):
        ckpt.restore(into=state, strict=False, fallback=True)
    assert (state["a"] == 1).all() and (state["d"] == 0).all()


def test_the_file_of_another_step_is_not_taken_for_that_of_this(ckpt):
    for step in (1, 2):
        saved(ckpt, step, {"weight": torch.full((5000,), float(step))})
    shutil.copy(file_of(ckpt, 1), file_of(ckpt, 2))
    into = {"weight": torch.zeros(5000)}
    with pytest.raises(penstock.Error, match="step-00000002/rank-00000.pt: its records are not"):
        ckpt.restore(into=into)
    assert (into["weight"] == 0).all()
    with pytest.warns(UserWarning, match="step 1 is taken, since 2 is damaged"):
        assert (ckpt.restore(fallback=True)["weight"] == 1).all()


def test_a_file_that_was_cut_is_not_passed_over_in_silence(ckpt):
    saved(ckpt, 1, [1])
    saved(ckpt, 2, [2])
    os.truncate(file_of(ckpt, 2), 100)
    for name in "step-9", "step-x", "step-00000099":
        Path(ckpt.path(1)).with_name(name).mkdir()
    Path(ckpt.path(1)).with_name("step-9").joinpath("manifest.json").touch()
    assert ckpt.steps() == [1]
    with pytest.raises(penstock.Error, match="step-00000002|step 2"):
        ckpt.restore()
    with pytest.warns(UserWarning, match="step 1 is taken"):
        assert ckpt.restore(fallback=True) == [1]


def test_a_manifest_that_was_cut_says_what_to_do(ckpt):
    saved(ckpt, 1, [1])
    os.truncate(Path(ckpt.path(1), "manifest.json"), 100)
    for call in ckpt.show, ckpt.verify, ckpt.restore:
        with pytest.raises(penstock.Error, match="at byte 100: .* restore an earlier one; "
                                                 "'penstock ckpt verify --all'.* gc"):
            call(1)


def test_a_folder_that_was_removed_or_replaced_is_told_as_that(tmp_path):
    folder = tmp_path / "ckpt"
    with Checkpointer(folder) as ckpt:
        saved(ckpt, 1, [1])
        calls = [ckpt.latest, lambda: ckpt.show(1), ckpt.restore, lambda: ckpt.restore(1),
                 lambda: ckpt.save(2, [2])]
        shutil.rmtree(folder)
        for call in calls:
            with pytest.raises(FileNotFoundError, match="was removed or renamed .* open it anew"):
                call()
        folder.mkdir()
        for call in calls:
            with pytest.raises(FileNotFoundError, match="another folder is in the place"):
                call()
    with Checkpointer(folder) as ckpt:
        saved(ckpt, 2, [2])
        assert ckpt.steps() == [2]


def test_a_folder_that_is_removed_during_a_save_is_told_and_nothing_hangs(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "ckpt") as ckpt:
        real = ckpt._store
        monkeypatch.setattr(ckpt, "_store", lambda save: (shutil.rmtree(tmp_path / "ckpt"),
                                                          real(save))[1])
        ckpt.save(1, {"a": torch.ones(1000)})
        with pytest.raises(FileNotFoundError, match="was removed or renamed .* open it anew"):
            ckpt.wait()


def test_a_state_that_does_not_fit_is_no_reason_to_take_another_step(ckpt):
    saved(ckpt, 1, {"a": torch.ones(1)})
    saved(ckpt, 2, {"b": torch.ones(1)})
    with pytest.raises(ValueError, match="does not have a"):
        ckpt.restore(into={"a": torch.zeros(1)}, fallback=True)


# --------------------------------------------------------------------------------- what goes bad --

class Broken(Exception):
    pass


def fails(monkeypatch, name, error):
    """Have a part of the next save fail."""
    real = getattr(Checkpointer, name)

    def once(self, *arguments):
        monkeypatch.setattr(Checkpointer, name, real)
        raise error

    monkeypatch.setattr(Checkpointer, name, once)


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_an_error_in_the_background_comes_with_the_next_call(tmp_path, monkeypatch, call):
    ckpt = Checkpointer(tmp_path)
    saved(ckpt, 1, [1])
    fails(monkeypatch, "_store", penstock._error.refuse("write", "x", "the disk is full",
                                                        code=errno.ENOSPC))
    report = ckpt.save(2, [2])
    with pytest.raises(penstock.Error, match="the disk is full"):
        ckpt.save(3, [3]) if call == "save" else getattr(ckpt, call)()
    assert "the disk is full" in report.error and not report.done
    if call != "close":
        assert ckpt.steps() == [1] and not os.path.exists(ckpt.path(2))
        saved(ckpt, 3, [3])
        assert ckpt.steps() == [1, 3]
    ckpt.close()


def test_a_disk_that_gives_other_bytes_back_keeps_the_old_steps(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, keep=1) as ckpt:
        saved(ckpt, 1, [torch.ones(5000)])
        real = _penstock.TorchFile
        monkeypatch.setattr(_penstock, "TorchFile",
                            lambda path: (damage(Path(path)), real(path))[1])
        ckpt.save(2, [torch.ones(5000)])
        with pytest.raises(penstock.Error, match="rank-00000.pt"):
            ckpt.wait()
        monkeypatch.undo()
        assert ckpt.steps() == [1] and not os.path.exists(ckpt.path(2))


def test_a_full_disk_leaves_the_steps_before(tmp_path):
    """Of files that may not grow."""
    said = python("""
        import resource, signal, sys, torch, penstock

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        ckpt = penstock.Checkpointer(sys.argv[1])
        ckpt.save(1, [torch.ones(10)])
        ckpt.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        for step in 2, 3:
            try:
                ckpt.save(step, [torch.ones(1 << 20)])
                ckpt.wait()
            except penstock.Error as error:
                print(error.errno, ckpt.steps())
        ckpt.save(4, [torch.ones(10)])
        ckpt.close()
    """, tmp_path).stdout
    assert said.splitlines() == [f"{errno.EFBIG} [1]"] * 2
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1, 4]
        assert sorted(os.listdir(tmp_path)) == [".penstock.lock", "step-00000001", "step-00000004"]


# --------------------------------------------------------------------------------------- the end --

END = """
    import sys, torch, penstock
    from penstock._checkpointer import Checkpointer

    store = Checkpointer._store
    def slowly(self, save):
        import time
        time.sleep(0.5)
        if "fail" in sys.argv:
            raise OSError("no more")
        return store(self, save)
    Checkpointer._store = slowly
    ckpt = Checkpointer(sys.argv[1])
    ckpt.save(1, {"a": torch.ones(1000)})
"""


@pytest.mark.parametrize("end, code", [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("del ckpt", 0)])
def test_the_end_of_the_program_waits_for_the_save(tmp_path, end, code):
    done = python(textwrap.dedent(END) + end, tmp_path, check=False)
    assert done.returncode == code and ("ZeroDivision" in done.stderr) is (code == 1)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore()["a"].sum() == 1000


def test_what_fails_at_the_end_is_told(tmp_path):
    done = python(END, tmp_path, "fail")
    assert "penstock: step 1 was not saved: OSError: no more" in done.stderr
    assert os.listdir(tmp_path) == [".penstock.lock"]


def test_a_step_that_is_there_is_not_called_lost_at_the_end(ckpt, monkeypatch, capsys):
    fails(monkeypatch, "_remove_old", OSError("it stays"))
    ckpt.save(1, [])
    ckpt._wait()
    _checkpointer._tell()
    assert "penstock: step 1 was saved, but older ones were not removed: OSError: it stays" \
        in capsys.readouterr().err
    with pytest.raises(OSError, match="it stays"):
        ckpt.wait()


def test_an_old_step_that_cannot_go_is_named_and_the_new_one_is_called_saved(tmp_path):
    """A folder in the place of its manifest cannot be removed as a file can, by root neither."""
    with Checkpointer(tmp_path, keep=1) as ckpt:
        saved(ckpt, 1, [1])
        manifest = Path(ckpt.path(1), "manifest.json")
        manifest.unlink()
        manifest.mkdir()
        report = ckpt.save(2, [2])
        with pytest.raises(penstock.Error, match=f"remove steps in {ckpt.path(1)}: "):
            ckpt.wait()
        assert ckpt.steps() == [2] and report.done and report.error
        assert "failed:" not in str(report)
        assert "it is saved, but older steps were not removed: cannot remove" in str(report)


def test_where_no_thread_is_to_be_had_a_save_is_done_when_it_returns(ckpt, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert ckpt.save(1, {"a": torch.ones(9)}).done
    with pytest.raises((AttributeError, TypeError)):
        ckpt.save(2, {"lock": threading.Lock()})
    assert ckpt.steps() == [1]


def test_ctrl_c_before_the_thread_of_a_save_begins_is_waited_for_by_nobody(ckpt, monkeypatch):
    def start(thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as now:
        now.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, [])
    saved(ckpt, 2, [])
    assert ckpt.steps() == [2]


def test_a_signal_abandons_the_save_and_the_next_start_sweeps(tmp_path):
    with Talk(textwrap.dedent(END) + "print('saved', flush=True)\nsys.stdin.readline()", tmp_path
              ) as talk:
        talk.line()
        talk.process.send_signal(signal.SIGTERM)
        assert talk.process.wait(30) == -signal.SIGTERM
    assert (tmp_path / "step-00000001").exists()
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() is None and os.listdir(tmp_path) == [".penstock.lock"]


INTERRUPTED = """
    import sys, torch, penstock

    class Announced(penstock.Checkpointer):
        def _limit_of(self, needed):
            print("begun", needed)
            return super()._limit_of(needed)

    ckpt = Announced(sys.argv[1], memory_limit=1 << 20)
    state = {f"t{i}": torch.ones(8 << 20) for i in range(12)}
    try:
        ckpt.save(1, state)
    except KeyboardInterrupt:
        print("stopped", ckpt.report().error)
    ckpt.save(2, {"a": 1})
    ckpt.close()
"""


def test_ctrl_c_in_save_abandons_it_and_another_goes_through(tmp_path):
    with Talk(INTERRUPTED, tmp_path) as talk:
        assert talk.line() == f"begun {12 * 32 * MIB}"
        talk.interrupt()
        said, _ = talk.end()
    assert said.splitlines()[0].startswith("stopped KeyboardInterrupt")
    assert sorted(os.listdir(tmp_path)) == [".penstock.lock", "step-00000002"]


def test_a_call_from_within_a_call_is_refused_and_does_not_wait_for_itself(ckpt):
    class Eager:
        """As a signal handler, which comes at any moment."""

        def state_dict(self):
            for call in lambda: ckpt.save(2, []), ckpt.wait, ckpt.restore:
                with pytest.raises(penstock.Error, match="Have a signal handler set a flag"):
                    call()
            return {"steps": ckpt.steps()}

    saved(ckpt, 1, {"eager": Eager()})
    assert ckpt.restore() == {"eager": {"steps": []}} and ckpt.steps() == [1]


def test_an_exception_in_the_block_is_not_hidden(tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="no more"), pytest.raises(Broken):
        with Checkpointer(tmp_path) as ckpt:
            fails(monkeypatch, "_store", penstock._error.refuse("write", "x", "no more"))
            ckpt.save(1, [1])
            raise Broken
