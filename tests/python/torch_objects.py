# SPDX-License-Identifier: MIT
"""Objects that people save with torch, one of each kind, and how to tell whether two are alike."""
import collections
import dataclasses
import io
import warnings

import numpy
import torch

from support import raw

QUANTISED = (torch.qint8, torch.quint8, torch.qint32)


def holds(dtype: torch.dtype) -> bool:
    """Can torch make plain tensors of it, and save them?"""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(torch.empty(4, dtype=dtype), io.BytesIO())
        return dtype not in QUANTISED
    except (RuntimeError, TypeError, KeyError):
        return False


DTYPES = sorted({value for value in vars(torch).values()
                 if isinstance(value, torch.dtype) and holds(value)}, key=str)


class Labelled(torch.Tensor):
    """A subclass that carries more than numbers."""


class Wrapped(torch.Tensor):
    """A subclass that is rebuilt by torch's ways for subclasses."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain:
    """An object of a program's own."""

    def __init__(self):
        self.weight = torch.arange(5.0)
        self.name = "plain"

    def __eq__(self, other):
        return self.name == other.name


class Looker:
    """Looks at the numbers of a tensor while it is unpickled."""

    def __init__(self, tensor):
        self.tensor, self.total = tensor, tensor.sum().item()

    def __getstate__(self):
        return {"tensor": self.tensor}

    def __setstate__(self, state):
        self.tensor = state["tensor"]
        self.total = self.tensor.sum().item()


@dataclasses.dataclass
class Record:
    weight: torch.Tensor
    step: int


Pair = collections.namedtuple("Pair", "left right")


def bits(dtype: torch.dtype, count: int = 24) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    data = numpy.random.default_rng(7).bytes(count * size)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), 0, (count,), (1,))


def optimizer_state() -> dict:
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3,
            "rng": torch.get_rng_state()}


def tied() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    model[1].weight = model[0].weight
    return model


def with_attribute() -> torch.Tensor:
    tensor = torch.arange(6.0)
    tensor.note = "kept"
    return tensor


def labelled() -> torch.Tensor:
    tensor = torch.arange(6.0).as_subclass(Labelled)
    tensor.label = "seven"
    return tensor


def twice() -> list:
    tensor = torch.arange(12.0)
    return [tensor, tensor, tensor[3:7], tensor.reshape(3, 4).t(), tensor[::2]]


def cyclic() -> list:
    loop = [torch.ones(3)]
    loop.append(loop)
    return loop


def per_channel() -> torch.Tensor:
    return torch.quantize_per_channel(torch.randn(4, 6), torch.rand(4) + 0.1, torch.zeros(4), 0,
                                      torch.qint8)


def quietly(make):
    """Some layouts are announced as unfinished."""
    def made():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()
    return made


def _sparse():
    return torch.eye(6)[:4]


#: By name, what makes one.
OBJECTS = {
    **{f"dtype {dtype}": (lambda dtype=dtype: bits(dtype)) for dtype in DTYPES},
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0),
    "no rows": lambda: torch.empty(0, 7, dtype=torch.int16),
    "no columns": lambda: [torch.empty(7, 0), torch.empty(3, 0, 2)],
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "permuted": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 5),
    "strided": lambda: torch.arange(40.0)[1::3],
    "part of a large one": lambda: torch.arange(5000.0)[100:110],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "shared": twice,
    "views alone": lambda: [(whole := torch.arange(9.0))[:4], whole[4:]],
    "conjugate": lambda: torch.randn(6, dtype=torch.complex64).conj(),
    "imaginary": lambda: torch.randn(6, dtype=torch.complex64).conj().imag,
    "negated": lambda: torch._neg_view(torch.arange(4.0)),
    "needs a gradient": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
    "with an attribute": with_attribute,
    "subclass": labelled,
    "another subclass": lambda: torch.arange(4.0).as_subclass(Wrapped),
    "buffer": lambda: torch.nn.Buffer(torch.arange(4.0)),
    "sparse coo": lambda: _sparse().to_sparse(),
    "sparse, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
    "sparse csr": quietly(lambda: _sparse().to_sparse_csr()),
    "sparse csc": quietly(lambda: _sparse().to_sparse_csc()),
    "sparse bsr": quietly(lambda: _sparse().to_sparse_bsr((2, 2))),
    "nested": quietly(lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)])),
    "jagged": quietly(lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)],
                                                         layout=torch.jagged)),
    "on meta": lambda: torch.empty(3, 4, device="meta"),
    "untyped storage": lambda: torch.arange(4.0).untyped_storage(),
    "typed storage": quietly(lambda: torch.arange(4.0).storage()),
    "storage and tensor": lambda: [(t := torch.arange(4, dtype=torch.uint8)), t.untyped_storage()],
    "state dict": lambda: torch.nn.Linear(5, 3).state_dict(),
    "checkpoint": optimizer_state,
    "module": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)),
    "tied module": tied,
    "containers": lambda: {"a": [1, 2.5, None, True], ("k", 1): {"x": torch.ones(2)}, 3: "drei",
                           "set": {1, 2}, "tuple": (torch.zeros(1), ()), "bytes": b"\x00\xff",
                           "array": bytearray(b"abc"), "complex": 1 + 2j, "long": 1 << 200,
                           "text": "ä名\U0001f600", "odd": float("inf")},
    "ordered": lambda: collections.OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
    "counter": lambda: collections.Counter("hello"),
    "torch's own words": lambda: [torch.Size([2, 3]), torch.device("cpu"), torch.float16,
                                  torch.strided, torch.device("cuda:1")],
    "nothing": lambda: None,
    "cyclic": cyclic,
    "long list": lambda: [torch.full((2,), float(i)) for i in range(300)],
    "many numbers": lambda: list(range(5000)),
    "numpy array": lambda: numpy.arange(6).reshape(2, 3),
    "numpy scalar": lambda: {"loss": numpy.float64(2.5)},
    "named tuple": lambda: Pair(torch.ones(2), 3),
    "record": lambda: Record(torch.arange(3.0), 4),
    "own object": Plain,
    "looks at its numbers": lambda: [torch.ones(1000), Looker(torch.arange(1000.0))],
    "packed sequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
}
if hasattr(torch, "quantize_per_tensor"):
    OBJECTS["quantised"] = quietly(lambda: torch.quantize_per_tensor(torch.randn(8), 0.1, 3,
                                                                     torch.quint8))
    OBJECTS["quantised by channel"] = quietly(per_channel)


class _Compare:
    """Two objects side by side; storages must be shared alike."""

    def __init__(self):
        self.storages: dict[int, int] = {}
        self.seen: set[tuple[int, int]] = set()
        self.kept: list = []

    def same(self, mine, theirs) -> bool:
        if (id(mine), id(theirs)) in self.seen:
            return True
        self.seen.add((id(mine), id(theirs)))
        self.kept += [mine, theirs]
        if type(mine) is not type(theirs):
            return False
        if isinstance(mine, torch.Tensor) and mine.is_nested:
            return self.tensors(mine, theirs)
        if isinstance(mine, torch.Tensor):
            return self.tensors(mine, theirs) and self.same(vars(mine), vars(theirs))
        if isinstance(mine, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return mine.tolist() == theirs.tolist() and mine.device == theirs.device
        if isinstance(mine, numpy.ndarray):
            return mine.dtype == theirs.dtype and numpy.array_equal(mine, theirs)
        if isinstance(mine, dict):
            return list(mine) == list(theirs) and all(self.same(mine[k], theirs[k]) for k in mine) \
                and self.same(getattr(mine, "__dict__", None), getattr(theirs, "__dict__", None))
        if isinstance(mine, (list, tuple)):
            return len(mine) == len(theirs) and all(map(self.same, mine, theirs))
        if type(mine).__module__ in ("torch", "builtins", "numpy") or not hasattr(mine, "__dict__"):
            return mine == theirs
        return self.same(vars(mine), vars(theirs))

    def tensors(self, mine, theirs) -> bool:
        def known(tensor):
            # The length of a jagged dimension is a number that is new each time.
            shape = tensor.dim() if tensor.is_nested else tensor.shape
            return (tensor.dtype, shape, tensor.layout, tensor.device, tensor.requires_grad,
                    tensor.is_quantized, tensor.is_leaf)

        if known(mine) != known(theirs):
            return False
        if mine.is_nested:
            return all(map(self.same, mine.unbind(), theirs.unbind()))
        if mine.layout == torch.sparse_coo:
            return mine.is_coalesced() == theirs.is_coalesced() \
                and self.tensors(mine._indices(), theirs._indices()) \
                and self.tensors(mine._values(), theirs._values())
        if mine.layout != torch.strided:
            return torch.equal(mine.to_dense(), theirs.to_dense())
        if mine.device.type == "meta":
            return mine.stride() == theirs.stride()
        if mine.is_quantized:
            return torch.equal(mine.int_repr(), theirs.int_repr()) \
                and torch.equal(mine.dequantize(), theirs.dequantize())
        return self.strided(mine, theirs)

    def strided(self, mine, theirs) -> bool:
        def laid(tensor):
            return (tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes(),
                    tensor.is_conj(), tensor.is_neg())

        if laid(mine) != laid(theirs):
            return False
        mine, theirs = mine.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor)
        if mine.untyped_storage().data_ptr():
            key = mine.untyped_storage()._cdata
            if self.storages.setdefault(key, theirs.untyped_storage()._cdata) \
                    != theirs.untyped_storage()._cdata:
                return False
        def bytes_of(tensor):
            return raw(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                tensor.untyped_storage()))
        return torch.equal(bytes_of(mine), bytes_of(theirs))


def alike(mine, theirs) -> bool:
    """The same classes, numbers, layouts and sharing."""
    return _Compare().same(mine, theirs) and _Compare().same(theirs, mine)
