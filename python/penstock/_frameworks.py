# SPDX-License-Identifier: MIT
"""What Penstock knows of the frameworks: where their memory is and how to look at it as tensors.

Each class below does the same few things for one framework, on one device:

    allocate(size)                      memory for a whole load -> (owner, address)
    adopt(memory)                       the same for memory that the engine allocated -> owner
    view(owner, offset, dtype, shape)   a tensor in it; dtype is an index into DTYPES
    alignment(dtype)                    what view() wants of an address, in bytes
    from_bytes(data, dtype, shape)      the same of bytes that are in memory (torch and numpy)
    compact(tensor)                     the same numbers, one after the other in memory
    address(name, tensor, ...)          where an existing tensor of the user's is, after checks
    convert(target, source)             copy with a change of dtype, on the device
    stream()                            the stream of the caller that must be honoured, or None

Frameworks are imported when the first tensor is asked for, not before.
"""
from __future__ import annotations

import sys
from collections.abc import Mapping

from . import _penstock
from ._device import device_name, open_device
from ._dtypes import dtype_index, known_dtype
from ._error import Error, misuse, refuse
from ._rules import Rules, Tensor

DTYPES = [name for name, _ in _penstock.DTYPES]
BITS = [bits for _, bits in _penstock.DTYPES]
_U8 = DTYPES.index("U8")

#: The default streams as CUDA's driver calls them; the handle 0 means "the default one".
STREAM_LEGACY = 1


def strides_of(shape) -> list[int]:
    """Of a contiguous tensor, in elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return strides[::-1]


def import_module(name: str, package: str | None = None):
    """Import a framework, or say plainly that it is not there."""
    from importlib import import_module as load

    try:
        return load(name)
    except ImportError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise ImportError(f"{package or name} is not installed, and tensors of it were asked for: "
                          f"pip install {package or name}, or take another with framework=, which "
                          "is 'pt' unless given", name=name) from None


def is_of(module: str, kind: str, thing) -> bool:
    """Is it of a class of a framework, which then is imported already?"""
    return isinstance(thing, getattr(sys.modules.get(module), kind, ()))


def is_floating(dtype: int) -> bool:
    """Is it a kind of floating number that loads convert from and to?"""
    return DTYPES[dtype][0] in "BF" and DTYPES[dtype] != "BOOL" and BITS[dtype] >= 8


#: What to do about a tensor that cannot be filled in place.
FILL_ANOTHER = "Fill a new one of torch.empty(), and copy or convert that"


def in_the_way(tensor) -> tuple[str, str] | None:
    """Why the bytes in a torch tensor's memory are not its numbers one after the other, and what to
    write instead; None where they are."""
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return "it is a nested tensor", "Take those of .unbind(), or .to_padded_tensor(0)"
    if layout != "strided":
        return f"its layout is {layout}", "Make it dense with .to_dense()"
    if tensor.device.type == "meta":
        return "it is on the device meta and has no bytes", \
            "Give it some with .to_empty() of its module or torch.empty_like(tensor, device='cpu')"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"it is on {tensor.device}", "Move it with .cpu()"
    if tensor.is_conj():
        return "it is a conjugate view, whose memory has other numbers", "Use .resolve_conj()"
    if tensor.is_neg():
        return "it is a negative view, whose memory has other numbers", "Use .resolve_neg()"
    if not tensor.is_contiguous():
        return "it is not contiguous", "Call .contiguous() on it"
    if tensor.numel() and not tensor.data_ptr():
        return f"this {type(tensor).__name__} has no memory of its own", \
            "Take the tensor that it stands for"
    return None


class Dlpack:
    """No framework: penstock.Array, for anything that speaks DLPack."""

    name = "dlpack"
    #: Must the bytes be there before a tensor is made of them?
    copies = False
    #: Do tensors have bytes?
    has_bytes = True
    #: Does safetensors take slices of these by itself, with fewer kinds of them (_slices.py)?
    narrow = False

    def __init__(self, device):
        """For tensors on this device."""
        self.device = device_name(device)

    def engine_device(self) -> _penstock.Device:
        """The engine's device."""
        return open_device(self.device)

    def stream(self) -> int | None:
        """Nobody else's work to wait for."""
        return None

    def allocate(self, size: int):
        """Memory of the engine's own."""
        memory = _penstock.Memory(self.engine_device(), size)
        return self.adopt(memory), memory.address

    def adopt(self, memory):
        """The memory itself is the owner."""
        return memory

    def view(self, owner, offset: int, dtype: int, shape):
        """A window into the memory."""
        return owner.array(offset, dtype, shape)

    def compact(self, tensor):
        """The same tensor with its numbers one after the other in memory."""
        return tensor

    def alignment(self, dtype: int) -> int:
        """Whoever takes the array may count on numbers at multiples of their size."""
        return max(BITS[dtype] // 8, 1)

    def dtype(self, index: int):
        """The framework's own dtype, or an error that names it."""
        return index

    def check(self, name: str, dtype: int) -> None:
        """Can a tensor of this dtype be made? Asked before anything is read."""
        try:
            self.dtype(dtype)
        except Error as error:
            raise refuse("load", name, f"it is {DTYPES[dtype]}, and {error.message}",
                         error.hint) from None

    def address(self, name: str, tensor, dtype: int, shape):
        """Arrays of others are not filled in this way; File.read() does that."""
        raise refuse("load into", name, f"into= is not possible with framework {self.name!r}",
                     "Use framework 'pt', 'np' or 'cupy'")

    def span(self, tensor) -> tuple[int, int]:
        """Address and size of a tensor of the user's."""
        return 0, 0

    def changed(self, tensors) -> None:
        """Tensors of the user's were filled."""

    def dtype_index(self, dtype) -> int:
        """Which of DTYPES a user's dtype is: from torch.float16, numpy.float16, "fp16", "F16"."""
        return known_dtype(dtype)

    def check_converts(self, tensor: Tensor, dtype: int) -> None:
        """What the engine does not convert on the way is left to convert(). Is there one?"""
        raise refuse("convert to", DTYPES[dtype], f"{tensor.name} is {DTYPES[tensor.dtype]}, and "
                     f"only numbers of BF16, F16 and F32, at multiples of their size, become each "
                     f"other without a framework such as torch; {self.name!r} does not convert",
                     "Use framework 'pt', 'np' or 'cupy', or convert afterwards")


class Torch(Dlpack):
    """torch.Tensor. GPU memory comes from torch's own allocator, so torch knows about it."""

    name = "pt"
    _names = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16",
        "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16",
        "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F4": "float4_e2m1fn_x2",
    }
    #: What every torch takes by DLPack as it is; others come as bytes first.
    _carried = frozenset(("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64",
                          "C64"))

    def __init__(self, device):
        """For tensors on this device."""
        self.torch = import_module("torch")
        super().__init__(device)
        self.on_gpu = self.device != "host"
        self.torch_device = self.torch.device(self.device if self.on_gpu else "cpu")
        self._dtypes: dict[int, object] = {}

    def dtype(self, index: int):
        """torch's dtype, or an error that names it."""
        dtype = self._dtypes.get(index)
        if dtype is None:
            dtype = getattr(self.torch, self._names.get(DTYPES[index], ""), None)
            if dtype is None:
                raise refuse("make a tensor of", DTYPES[index], "torch has no such dtype here",
                             "Use framework='dlpack', or a newer torch")
            self._dtypes[index] = dtype
        return dtype

    def stream(self) -> int | None:
        """torch's current stream: what it still has to do with the memory comes first."""
        if not self.on_gpu:
            return None
        return self.torch.cuda.current_stream(self.torch_device).cuda_stream or STREAM_LEGACY

    def allocate(self, size: int):
        """From torch on a GPU; from the engine on the host, whose huge pages make reads faster."""
        if not self.on_gpu:
            return super().allocate(size)
        try:
            owner = self.torch.empty(size, dtype=self.torch.uint8, device=self.torch_device)
        except (RuntimeError, AssertionError) as error:
            # torch says in its own words what it lacks: no GPU, no driver, built without CUDA.
            if isinstance(error, self.torch.OutOfMemoryError):
                raise
            raise refuse("allocate memory on", self.device, str(error).split("\n", 1)[0],
                         "Is there a GPU, and a torch built for it? device='cpu' needs none",
                         also=(type(error),)) from error
        return owner, owner.data_ptr()

    def view(self, owner, offset: int, dtype: int, shape):
        """A tensor with a storage of its own that reaches exactly over its bytes. So one weight
        that is saved is saved alone, no code takes two weights for one, and autograd does not
        take a change of one for a change of all. DLPack does that, without a copy."""
        if DTYPES[dtype] in self._carried and 0 not in shape \
                and not isinstance(owner, self.torch.Tensor):
            return self.torch.utils.dlpack.from_dlpack(
                owner.array(offset, dtype, shape).__dlpack__())
        tensor = self.torch.empty(0, dtype=self.dtype(dtype), device=self.torch_device)
        if BITS[dtype] == 4:
            shape = self._packed(shape)
        size = tensor.element_size()
        for length in shape:
            size *= length
        if not size:
            return tensor.reshape(shape)
        if isinstance(owner, self.torch.Tensor) and owner.numel() == size:
            # torch's own allocation as it is: record_stream() and sharing between processes work.
            return tensor.set_(owner.untyped_storage(), 0, shape, strides_of(shape))
        if isinstance(owner, self.torch.Tensor):
            capsule = self.torch.utils.dlpack.to_dlpack(owner[offset:offset + size])
        else:
            capsule = owner.array(offset, _U8, (size,)).__dlpack__()
        storage = self.torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
        return tensor.set_(storage, 0, shape, strides_of(shape))

    def compact(self, tensor):
        """A copy only where it is needed."""
        return tensor.contiguous()

    def from_bytes(self, data: bytearray, dtype: int, shape):
        """A tensor of bytes that are in memory; it keeps and changes them."""
        shape = self._packed(shape) if BITS[dtype] == 4 else shape
        if not data:
            return self.torch.empty(shape, dtype=self.dtype(dtype), device="cpu")
        return self.torch.frombuffer(data, dtype=self.torch.uint8).view(
            self.dtype(dtype)).reshape(shape)

    def alignment(self, dtype: int) -> int:
        """torch loads numbers from any address."""
        return 1

    @staticmethod
    def _packed(shape) -> tuple:
        """Two 4-bit numbers share a byte, and torch counts bytes."""
        if not shape or shape[-1] % 2:
            raise refuse("make a tensor of", "F4", f"its last dimension is odd: {tuple(shape)}",
                         "Use framework='dlpack'")
        return (*shape[:-1], shape[-1] // 2)

    def address(self, name: str, tensor, dtype: int, shape):
        """Of a tensor of the user's that can take the bytes as they are."""
        def wrong(message: str, hint: str = ""):
            return refuse("load into", name, message, hint)

        if not isinstance(tensor, self.torch.Tensor):
            raise wrong(f"a {type(tensor).__name__} is no torch tensor")
        problem = in_the_way(tensor)
        if problem is not None:
            raise wrong(problem[0], FILL_ANOTHER)
        if str(tensor.device) not in (self.device, str(self.torch_device)):
            raise wrong(f"the tensor is on {tensor.device}, the load goes to {self.device}",
                        f"Load with device={str(tensor.device)!r}")
        self.compare(name, tensor, dtype, shape)
        return tensor.data_ptr()

    def compare(self, name: str, tensor, dtype: int, shape) -> None:
        """Is a tensor of the user's, wherever it is, of the kind that the file has?"""
        expected = self._packed(shape) if BITS[dtype] == 4 else tuple(shape)
        if tuple(tensor.shape) != expected:
            raise refuse("load into", name, f"the tensor has shape {tuple(tensor.shape)}, the file "
                         f"{expected}")
        if tensor.dtype == self.dtype(dtype):
            return
        kind = dtype_index(tensor.dtype)
        hint = f"Fill a new one of dtype={self.dtype(dtype)}, and convert that"
        if is_floating(dtype) and kind is not None and is_floating(kind):
            # A dtype for all does not mean tensors of 8 bits.
            wish = tensor.dtype if BITS[dtype] > 8 else {name: tensor.dtype}
            hint = f"Pass dtype={wish} to have it converted"
        raise refuse("load into", name,
                     f"the tensor is {tensor.dtype}, the file has {DTYPES[dtype]}", hint)

    def check_converts(self, tensor: Tensor, dtype: int) -> None:
        """It converts all that there are."""

    def span(self, tensor) -> tuple[int, int]:
        """Address and size of a tensor of the user's."""
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()

    def changed(self, tensors) -> None:
        """Autograd must know that what it may have saved is not what it was."""
        increment = getattr(self.torch.autograd.graph, "increment_version", None)
        if increment is not None:
            for tensor in tensors:
                if not tensor.is_inference():
                    increment(tensor)

    def convert(self, target, source) -> None:
        """On the device, queued on the caller's stream."""
        with self.torch.no_grad():
            target.copy_(source)


class Meta(Torch):
    """torch.Tensor on torch's device "meta": a dtype and a shape."""

    has_bytes = False

    def __init__(self):
        """There is one such device."""
        self.torch = import_module("torch")
        self.device, self.on_gpu = "meta", False
        self.torch_device = self.torch.device("meta")
        self._dtypes = {}

    def allocate(self, size: int):
        """Nothing, for tensors that are converted."""
        return None, 0

    def view(self, owner, offset: int, dtype: int, shape):
        """Of nothing."""
        shape = self._packed(shape) if BITS[dtype] == 4 else shape
        return self.torch.empty(shape, dtype=self.dtype(dtype), device=self.torch_device)


class Numpy(Dlpack):
    """numpy.ndarray, on the host. bfloat16 and the 8-bit floats come from ml_dtypes."""

    name, module = "np", "numpy"
    narrow = True
    _plain = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16",
        "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16",
        "F32": "float32", "F64": "float64", "C64": "complex64",
    }
    _extra = {
        "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }

    def __init__(self, device):
        """For arrays on this device."""
        self.numpy = import_module("numpy")
        super().__init__(device)
        self._check_device()

    def _check_device(self) -> None:
        if self.device != "host":
            raise misuse("load to", self.device, "numpy arrays are in host memory",
                         "Use device='cpu', or framework='cupy' for a GPU")

    def dtype(self, index: int):
        """numpy's dtype, or an error that names it."""
        name = DTYPES[index]
        if name in self._plain:
            return self.numpy.dtype(self._plain[name])
        if name in self._extra:
            try:
                import ml_dtypes
            except ImportError:
                raise refuse("make an array of", name, "numpy itself has no such dtype",
                             "pip install ml_dtypes, or use framework='pt'") from None
            return self.numpy.dtype(getattr(ml_dtypes, self._extra[name]))
        raise refuse("make an array of", name, "numpy has no such dtype",
                     "Use framework='dlpack'")

    def view(self, owner, offset: int, dtype: int, shape):
        """Through the buffer protocol, without a copy; the array keeps the memory."""
        kind = self.dtype(dtype)
        count = 1
        for length in shape:
            count *= length
        raw = owner.array(offset, _U8, (count * BITS[dtype] // 8,))
        return self.numpy.frombuffer(raw, self.numpy.uint8).view(kind).reshape(shape)

    def compact(self, array):
        """A copy only where it is needed."""
        return self.numpy.asarray(array, order="C")

    def from_bytes(self, data: bytearray, dtype: int, shape):
        """An array of bytes that are in memory; it keeps and changes them."""
        return self.numpy.frombuffer(data, self.numpy.uint8).view(self.dtype(dtype)).reshape(shape)

    def alignment(self, dtype: int) -> int:
        """numpy has slow ways for arrays that are not aligned, and C code often none."""
        return self.dtype(dtype).alignment

    def span(self, tensor) -> tuple[int, int]:
        """Address and size of an array of the user's."""
        return self._pointer(tensor), tensor.nbytes

    def _on_device(self, array) -> bool:
        return isinstance(array, self.numpy.ndarray)

    def _pointer(self, array) -> int:
        return array.ctypes.data

    def address(self, name: str, tensor, dtype: int, shape):
        """Of an array of the user's that can take the bytes as they are."""
        if not self._on_device(tensor):
            raise refuse("load into", name, f"a {type(tensor).__name__} is no array on "
                         f"{self.device}")
        if tensor.dtype != self.dtype(dtype) or tuple(tensor.shape) != tuple(shape):
            raise refuse("load into", name, f"the array is {tensor.dtype} {tensor.shape}, the "
                         f"file {DTYPES[dtype]} {tuple(shape)}")
        if not tensor.flags.c_contiguous or not getattr(tensor.flags, "writeable", True):
            raise refuse("load into", name, "the array is not contiguous and writable",
                         f"Fill a new one, made with {self.module}.empty(), and copy that")
        return self._pointer(tensor)

    def check_converts(self, tensor: Tensor, dtype: int) -> None:
        """It converts all that there are."""

    def convert(self, target, source) -> None:
        """Element by element."""
        target[...] = source


class Cupy(Numpy):
    """cupy.ndarray, on a GPU."""

    name = module = "cupy"
    narrow = False

    def __init__(self, device):
        """For arrays on this GPU."""
        self.cupy = import_module("cupy", "cupy-cuda13x")
        super().__init__(device)

    def _check_device(self) -> None:
        if self.device == "host":
            raise refuse("load to", self.device, "CuPy arrays are in GPU memory",
                         "Use device='cuda:0', or framework='np' for the host")
        self.gpu = self.cupy.cuda.Device(int(self.device.partition(":")[2]))

    def stream(self) -> int | None:
        """CuPy's current stream."""
        with self.gpu:
            return self.cupy.cuda.get_current_stream().ptr or STREAM_LEGACY

    def allocate(self, size: int):
        """From CuPy's own pool."""
        with self.gpu:
            owner = self.cupy.empty(size, self.cupy.uint8)
        return owner, owner.data.ptr

    def adopt(self, memory):
        """Through DLPack, without a copy."""
        return self.cupy.from_dlpack(memory.array(0, _U8, (memory.size,)))

    def view(self, owner, offset: int, dtype: int, shape):
        """A slice of the owner, seen with another dtype."""
        size = BITS[dtype] // 8
        for length in shape:
            size *= length
        with self.gpu:
            return owner[offset:offset + size].view(self.dtype(dtype)).reshape(shape)

    def _on_device(self, array) -> bool:
        return isinstance(array, self.cupy.ndarray) and array.device == self.gpu

    def _pointer(self, array) -> int:
        return array.data.ptr

    def convert(self, target, source) -> None:
        """On the GPU."""
        with self.gpu:
            target[...] = source.astype(target.dtype)


class Jax(Dlpack):
    """jax.Array, through DLPack."""

    name = "jax"
    copies = narrow = True

    def __init__(self, device):
        """For arrays on this device."""
        self.jax = import_module("jax")
        super().__init__(device)
        if self.device != "host":
            try:
                self.jax.devices("cuda")
            except RuntimeError as error:
                raise misuse("load to", self.device, f"JAX sees no GPU: {error}",
                             "Install a JAX for CUDA, or use device='cpu'") from None

    def view(self, owner, offset: int, dtype: int, shape):
        """Looks at the engine's memory; 64-bit numbers need jax_enable_x64, as always in JAX."""
        kind = self.dtype(dtype)
        if kind is None:
            return self.jax.dlpack.from_dlpack(owner.array(offset, dtype, shape))
        raw = self.jax.dlpack.from_dlpack(owner.array(offset, _U8, shape))
        return self.jax.lax.bitcast_convert_type(raw, kind)

    def alignment(self, dtype: int) -> int:
        """JAX copies by itself what does not suit it."""
        return 1

    def dtype(self, index: int):
        """None where DLPack carries it; else what its bytes are to be taken for."""
        name = DTYPES[index]
        if BITS[index] < 8:
            raise refuse("make an array of", name, "JAX cannot look at packed numbers",
                         "Use framework='dlpack'")
        if not name.startswith("F8"):
            return None
        kind = getattr(self.jax.numpy, Numpy._extra[name], None)
        if kind is None:
            raise refuse("make an array of", name, "this JAX has no such dtype")
        return kind


_adapters = {"pt": Torch, "torch": Torch, "pytorch": Torch, "np": Numpy, "numpy": Numpy,
             "cupy": Cupy, "jax": Jax, "flax": Jax, "dlpack": Dlpack}


def adapter(framework: str, device) -> Dlpack:
    """The class for a framework's name, on a device."""
    if not isinstance(framework, str):
        raise TypeError(f"framework is a text such as 'pt' or 'np', not {framework!r}")
    kind = _adapters.get(framework)
    if kind is None:
        raise misuse("use framework", framework, "it is not known",
                     "Take 'pt', 'np', 'cupy', 'jax' or 'dlpack'")
    if str(device) != "meta":
        return kind(device)
    if kind is not Torch:
        raise misuse("load to", "meta", "only torch has this device", "Use framework='pt'")
    return Meta()


class Adapters:
    """Where the tensors of a load go: all to one device, or each where a map of names says."""

    def __init__(self, framework: str, device):
        """`device` is one, or a mapping of names, parts of the model and globs to devices."""
        self.framework = framework
        self._made: dict[str, Dlpack] = {}
        #: Is each tensor to be asked for?
        self.mapped = isinstance(device, Mapping)
        if not self.mapped:
            self.only: Dlpack | None = self.at(device)
            return
        self._rules = Rules("device", {name: self.at(where) for name, where in device.items()},
                            "devices", parts=True)
        if not self._made:
            raise refuse("use", "device", "the map is empty", 'Name a device for all: {"": "cpu"}')
        self.only = next(iter(self._made.values())) if len(self._made) == 1 else None

    def at(self, device) -> Dlpack:
        """The one for a device."""
        name = "meta" if str(device) == "meta" else device_name(device)
        if name not in self._made:
            self._made[name] = adapter(self.framework, name)
        return self._made[name]

    def of(self, tensor: Tensor) -> Dlpack:
        """The one for a tensor."""
        found = self._rules.of(tensor) if self.mapped else self.only
        if found is None:
            raise refuse("place", tensor.name, "the map of devices says nothing of it",
                         'Name a device for all others, as in {"": "cpu"}')
        return found

    def all(self) -> list[Dlpack]:
        """Those that tensors may go to."""
        return list(self._made.values())
