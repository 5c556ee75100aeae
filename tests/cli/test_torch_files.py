# SPDX-License-Identifier: MIT
"""Files of torch.save: inspect lists what torch.load gives, verify finds what is damaged."""
import collections
import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import pytest

from cli_program import PROGRAM, ROOT
from test_options import documented_members, members

torch = pytest.importorskip("torch")

REPACK = ROOT / "build" / "examples" / "example-repack_torch"


def inspect(penstock, path, *args):
    return penstock.ok("inspect", path, *args, "--json").json


def flatten(value, way=()):
    """(name, tensor) of all tensors, named as the command names them."""
    if isinstance(value, torch.Tensor):
        yield ".".join(way), value
    elif isinstance(value, dict):
        for key, item in value.items():
            word = str(key) if type(key) in (str, int) else "?"
            yield from flatten(item, (*way, word))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from flatten(item, (*way, str(i)))


def described(tensor):
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "stride": list(tensor.stride())}


def states():
    """State of every kind that torch describes by storage, shape and stride."""
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    yield "nested", {"a": base, "b": [base[0], {"c": (base.t() if base.dim() == 2 else base,)}],
                     7: torch.zeros(2), "n": None, "f": 1.5, "s": "text", "t": (1, 2)}
    yield "alone", torch.randn(5)
    yield "list", [torch.randn(2), torch.randn(3)]
    yield "views", {"whole": base, "part": base[1, 1:, ::2], "turned": base.permute(2, 0, 1),
                    "spread": torch.ones(1).expand(1000)}
    yield "empty", {"none": torch.empty(0), "flat": torch.empty(3, 0, 5), "number": torch.tensor(3)}
    yield "parameters", {"p": torch.nn.Parameter(torch.ones(3)),
                         "q": torch.ones(3, requires_grad=True)}
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    yield "ordered", layers.state_dict()
    yield "conjugate", {"c": torch.randn(4, dtype=torch.complex64).conj()}
    model = torch.nn.Linear(3, 4)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    adam.step()
    yield "optimizer", {"model": model.state_dict(), "optimizer": adam.state_dict()}
    for name in ("bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 "
                 "float64 complex64 complex128 float8_e4m3fn float8_e5m2 "
                 "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu").split():
        yield name, {"x": torch.zeros(6 * 16, dtype=torch.uint8).view(getattr(torch, name))[:6]}
    keys = {"with.point": torch.ones(1), "": torch.ones(2), "snow \u2603": torch.ones(3),
            (1, 2): torch.ones(4)}
    yield "keys", keys
    yield "deep", {"a": {"b": {"c": {"d": [[[torch.ones(1)]]]}}}}
    yield "many", {f"layer.{i}": torch.full((i % 7,), i) for i in range(3000)}


STATES = list(states())


def check(penstock, path, state):
    found = inspect(penstock, path)
    # The newest protocols are none of those that weights_only knows; the file is our own.
    tensors = dict(flatten(torch.load(path, weights_only=False)))
    assert {entry["name"]: {key: entry[key] for key in ("dtype", "shape", "stride")}
            for entry in found["tensors"]} == \
        {name: described(tensor) for name, tensor in tensors.items()}
    assert len(found["tensors"]) == len(list(flatten(state)))
    raw = path.read_bytes()
    sizes = {record["name"]: record for record in found["records"]}
    for entry in found["tensors"]:
        tensor, record = tensors[entry["name"]], sizes[entry["record"]]
        assert entry["bytes"] == tensor.numel() * tensor.element_size()
        if tensor.numel():
            first = tensor.resolve_conj().reshape(-1)[:1].clone() if not tensor.is_conj() else None
            here = raw[entry["offset"]:entry["offset"] + tensor.element_size()]
            assert first is None or bytes(first.untyped_storage()) == here
            assert record["offset"] <= entry["offset"] < record["offset"] + record["bytes"]
    assert members(found) <= documented_members("inspect")
    return found


@pytest.mark.parametrize("state", [state for _, state in STATES], ids=[name for name, _ in STATES])
@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_are_those_that_torch_loads(penstock, tmp_path, state, protocol):
    path = tmp_path / "state.pt"
    torch.save(state, path, pickle_protocol=protocol)
    found = check(penstock, path, state)
    assert found["verifiable"] == "crc32"
    zipped = {info.filename.split("/", 1)[1]: info for info in zipfile.ZipFile(path).infolist()}
    assert {record["name"]: (record["bytes"], record["crc32"]) for record in found["records"]} == \
        {name: (info.file_size, info.CRC) for name, info in zipped.items()}


@pytest.mark.parametrize("state", [state for _, state in STATES], ids=[name for name, _ in STATES])
def test_what_penstock_writes_torch_loads(penstock, tmp_path, state):
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save(state, old)
    subprocess.run([REPACK, old, new], check=True, capture_output=True)
    assert check(penstock, new, state)["verifiable"] == "digests"
    assert zipfile.ZipFile(new).testzip() is None
    for mmap in (False, True):
        again = torch.load(new, weights_only=True, mmap=mmap)
        for (name, was), (other, now) in zip(flatten(state), flatten(again), strict=True):
            assert name == other and was.dtype == now.dtype and was.stride() == now.stride()
            assert bytes(was.untyped_storage()) == bytes(now.untyped_storage())


def test_plain_tools_find_nothing_wrong(tmp_path):
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save({"a": torch.randn(3000), "b": torch.randn(5)}, old)
    subprocess.run([REPACK, old, new], check=True, capture_output=True)
    try:
        done = subprocess.run(["unzip", "-t", new], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("unzip is not installed")
    assert done.returncode == 0 and "No errors" in done.stdout, done.stdout + done.stderr


class Other:
    """A class of its own, with tensors in it."""
    def __init__(self):
        self.inside = torch.ones(3)
        self.text = "x"


class Sub(torch.Tensor):
    pass


def test_other_objects_are_looked_through_and_never_made(penstock, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    path = tmp_path / "odd.pt"
    torch.save({"o": Other(), "bomb": Bomb(), "sub": torch.ones(2).as_subclass(Sub),
                "default": collections.defaultdict(list, {"d": torch.ones(4)}),
                "q": torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8),
                "sparse": torch.eye(3).to_sparse()}, path)
    shapes = {entry["name"]: (entry["dtype"], entry["shape"])
              for entry in inspect(penstock, path)["tensors"]}
    assert shapes["o.inside"] == ("float32", [3]) and shapes["sub"] == ("float32", [2])
    assert shapes["default.d"] == ("float32", [4]) and shapes["q"] == ("quint8", [8])
    assert sorted(name.split(".")[0] for name in shapes).count("sparse") == 2
    assert not (tmp_path / "exploded").exists()


def test_keys_choose_tensors(penstock, tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"a": {"w": torch.ones(3), "b": torch.ones(1)}, "c": torch.ones(5)}, path)
    found = inspect(penstock, path, "-k", "a.*")
    assert [entry["name"] for entry in found["tensors"]] == ["a.w", "a.b"]
    assert found["total"] == {"tensors": 2, "bytes": 16}
    error = penstock.fails("inspect", path, "-k", "nothing*")
    assert "none of its 3 tensors" in error["message"]


def test_people_get_columns(penstock, tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"a": torch.ones(3, 4), "long.name": torch.ones(1)}, path)
    lines = penstock.ok("inspect", path).out.splitlines()
    assert lines[0] == str(path) and "8 records" in lines[1] and "CRC32" in lines[2]
    head = next(line for line in lines if line.split()[:1] == ["name"])
    row = next(line for line in lines if line.split()[:1] == ["long.name"])
    assert head.index("dtype") == row.index("float32") and row.endswith("data/1")


# ------------------------------------------------------------------------------------- verify

def test_a_good_file_is_verified(penstock, tmp_path):
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save({"a": torch.randn(70000)}, old)
    subprocess.run([REPACK, old, new], check=True, capture_output=True)
    for path, by in ((old, "crc32"), (new, "digests")):
        found = penstock.ok("verify", path, "--json").json
        assert found["verified_by"] == by and found["unverified_bytes"] == 0
        assert found["verified_bytes"] == \
            sum(info.file_size for info in zipfile.ZipFile(path).infolist())
        assert members(found) <= documented_members("verify")
        assert "as they were saved" in penstock.ok("verify", path).out


@pytest.mark.parametrize("packed", [False, True])
def test_damage_is_told_by_file_tensor_and_byte(penstock, tmp_path, packed):
    path, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save({"first": torch.randn(50), "layer": {"w": torch.randn(700000)}}, path)
    if packed:
        subprocess.run([REPACK, path, new], check=True, capture_output=True)
        path = new
    place = inspect(penstock, path)["tensors"][1]["offset"]
    raw = bytearray(path.read_bytes())
    raw[place + 2000000] ^= 4
    path.write_bytes(raw)
    error = penstock.fails("verify", path)
    assert "tensor layer.w" in error["message"] and "data/1" in error["message"]
    assert error["object"] == str(path) and error["domain"] == "format"
    assert place <= error["offset"] <= place + 2000000
    if packed:
        assert error["offset"] > place + 2000000 - (1 << 20)


def test_a_file_without_sums_is_said_to_have_none(penstock, tmp_path):
    from torch.utils.serialization import config
    path = tmp_path / "bare.pt"
    config.save.compute_crc32 = False
    try:
        torch.save({"a": torch.randn(50)}, path)
    finally:
        config.save.compute_crc32 = True
    assert "without CRC32s" in penstock.ok("verify", path).out
    found = penstock.ok("verify", path, "--json").json
    assert found["verified_by"] == "nothing" and found["verified_bytes"] == 0


def test_safetensors_have_headers_only(penstock, tmp_path):
    from safetensors.torch import save_file
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    out = penstock.ok("verify", tmp_path / "x.safetensors").out
    assert "no\n  checksums" in out
    found = penstock.ok("verify", tmp_path / "x.safetensors", "--json").json
    assert found["format"] == "safetensors" and found["verified_bytes"] == 0
    (tmp_path / "x.safetensors").write_bytes(b"\x08" + bytes(30))
    assert penstock.fails("verify", tmp_path / "x.safetensors")["domain"] == "format"


def test_files_that_are_none_are_told_apart(penstock, tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert "torch.save" in penstock.fails("inspect", path)["hint"]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/other", "data")
    assert "no data.pkl" in penstock.fails("inspect", path)["message"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", pickle.dumps({}) * 100)
    assert "compressed" in penstock.fails("inspect", path)["message"]


# ---------------------------------------------------------------------------- beside torch

def mutate(raw, directory, random):
    """One change, mostly where zips and pickles keep what matters."""
    raw = bytearray(raw)
    for _ in range(random.randint(1, 3)):
        at = random.choice([random.randrange(len(raw)), random.randrange(directory, len(raw)),
                            random.randrange(min(600, len(raw)))])
        kind = random.randrange(4)
        if kind == 0:
            raw[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            raw[at] = random.choice([0, 1, 0x7f, 0x80, 0xff])
        elif kind == 2 and at + 8 <= len(raw):
            struct.pack_into("<I", raw, at, random.choice([0, 0xffffffff, 1 << 31, len(raw)]))
        else:
            del raw[at:at + random.randint(1, 4)]
    return bytes(raw)


def test_what_is_accepted_of_broken_files_is_what_torch_sees(penstock, tmp_path):
    """Whatever the command lists of a damaged file, torch loads with the same shapes, if at all."""
    import random
    chance = random.Random(13)
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(6.).reshape(2, 3), "b": [torch.ones(4)]}, buffer)
    raw, listed = buffer.getvalue(), 0
    directory = zipfile.ZipFile(buffer).start_dir
    path = tmp_path / "broken.pt"
    for _ in range(300):
        path.write_bytes(mutate(raw, directory, chance))
        result = penstock("inspect", path, "--json")
        assert result.status in (0, 1)
        if result.status:
            assert result.json["error"]["message"]
            continue
        try:
            loaded = torch.load(path, weights_only=True)
        except Exception:
            continue
        mine = {entry["name"]: entry["shape"] for entry in result.json["tensors"]}
        assert mine == {name: list(tensor.shape) for name, tensor in flatten(loaded)}
        listed += 1
    assert listed > 20


@pytest.mark.parametrize("names, words", [
    (["a.bin"], "'penstock inspect' lists one"),
    (["manifest.json", "rank-00000.pt"], "'penstock ckpt show'"),
    (["step-00000001/manifest.json"], "'penstock ckpt list'"),
    (["__0_0.distcp"], "penstock.dcp.Reader"),
], ids=["torch", "step", "steps", "ranks"])
@pytest.mark.parametrize("command", ["inspect", "verify", "load"])
def test_folders_without_a_model_are_told_who_knows_them(penstock, tmp_path, command, names, words):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    result = penstock(command, tmp_path)
    assert result.status == 1 and words in result.err


def test_files_of_torch_that_cannot_be_loaded_are_told_what_can(penstock, tmp_path):
    for zipped, words in ((True, "penstock.load()"), (False, "torch.load()")):
        path = tmp_path / "state.pt"
        torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=zipped)
        result = penstock("load", path)
        assert result.status == 1 and words in result.err and "penstock.save_file()" in result.err


# --------------------------------------------------------- of torch.distributed.checkpoint --

SAVE = """
import torch, torch.distributed.checkpoint as dcp, {module} as module
state = {{"a": torch.randn(300), "b": torch.randn(50_000), "note": {{"steps": [1, "two"]}}}}
dcp.save(state, storage_writer=module.{writer}({folder!r}), no_dist=True)
"""


@pytest.fixture(scope="module", params=[("torch.distributed.checkpoint", "FileSystemWriter"),
                                        ("penstock.dcp", "Writer")], ids=["torch", "penstock"])
def sharded(request, tmp_path_factory):
    """A folder of torch's, and one with the gaps and tables that Penstock writes."""
    module, writer = request.param
    package = PROGRAM.parent / "python"
    if module == "penstock.dcp" and not list(package.glob("penstock/_penstock*.so")):
        pytest.skip("the package is not built")
    folder = tmp_path_factory.mktemp("dcp") / "step"
    subprocess.run([sys.executable, "-W", "ignore", "-c", SAVE.format(
        module=module, writer=writer, folder=str(folder))], check=True, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(package)}, timeout=120)
    return folder


def test_checkpoints_of_many_ranks_are_listed_and_verified(penstock, sharded):
    for path in (sharded, sharded / "__0_0.distcp"):
        found = penstock.ok("verify", path, "--json").json
        assert found["format"] == "dcp" and found["verified_by"] == "crc32"
        assert found["verified_bytes"] > 200_000 and found["unverified_bytes"] == 0
        assert members(found) <= documented_members("verify")
        assert "as they were saved" in penstock.ok("verify", path).out
        found = inspect(penstock, path)
        assert [(file["name"], file["objects"]) for file in found["files"]] == [("__0_0.distcp", 3)]
        assert members(found) <= documented_members("inspect")
        assert "3 objects in 1 file" in penstock.ok("inspect", path).out


def test_damage_in_checkpoints_of_many_ranks_is_found(penstock, sharded, tmp_path):
    whole = (sharded / "__0_0.distcp").read_bytes()
    (tmp_path / ".metadata").write_bytes((sharded / ".metadata").read_bytes())
    path = tmp_path / "__0_0.distcp"

    def failure(content):
        path.write_bytes(content)
        assert penstock("verify", tmp_path).status == 1
        result = penstock("verify", path)
        assert result.status == 1
        return result.err

    middle = len(whole) // 2
    assert "not those that were saved" in failure(
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1:])
    assert "cut short" in failure(whole[:-1])
    assert "cut short" in failure(b"")
    first_end = whole.index(b"PK\5\6")
    assert "ends before this byte" in failure(
        whole[:first_end] + b"XX" + whole[first_end + 2:])
    # What is no zip at the beginning is a planner's own; a file without any was made otherwise.
    path.write_bytes(b"bytes as they are" + whole)
    assert penstock.ok("verify", path, "--json").json["unverified_bytes"] == 17
    assert "extension" in failure(b"packed by somebody")
    path.unlink()
    result = penstock("verify", tmp_path)
    assert result.status == 1 and "__0_0.distcp" in result.err and ".metadata names" in result.err
