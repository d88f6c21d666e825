"""Arrays in a host's shared memory, with NumPy's interface in all processes.

The first page of the memory says what lies behind it. The file grows where it is, so that growing copies nothing and
keeps every row. An array without a name has no file: other processes open it through the process that made it, and
nothing is left behind, however a job ends.
"""

import atexit
import contextlib
import fcntl
import json
import math
import mmap
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmpi.comm.agreement import on_all_ranks
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError
from jaxmpi.core.host_arrays import check_unmasked
from jaxmpi.core.random_keys import is_key
from jaxmpi.core.shared_memory import folder, reserve

PAGE = 4096
_mapped: dict[str, "SharedArray"] = {}  # arrays of the master, by path, that this process has been sent


class SharedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in shared memory, which reads and writes as NumPy's do.

    Operators, NumPy's functions and the methods of its arrays give plain arrays; `x += 1` and `out=x` write here. Only
    `resize` and `reshape` are its own: they change the array itself.
    """

    _is_free = True

    def __init__(self, handle: int, path: str, name: str = "") -> None:
        """Map an open file that has its first page."""
        self.name, self.path, self._handle, self._unlinks = name, path, handle, 0
        self._is_free = False
        self.refresh()

    # ------------------------------------------------------------ as an array

    @property
    def array(self) -> np.ndarray:
        """The memory as a NumPy array, a view valid until `free`."""
        if self._is_free:
            raise UsageError(f"the shared array {self.name!r} has been freed; make it anew")
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = lambda x: x.array if isinstance(x, SharedArray) else x  # noqa: E731
        out = options.get("out", ())
        options |= {"out": tuple(map(plain, out))} if out else {}
        result = getattr(ufunc, method)(*map(plain, inputs), **options)
        return out[0] if len(out) == 1 else result

    def __reduce__(self) -> Any:
        return map_once, (self.path, self.shape)

    def __getattr__(self, name: str) -> Any:  # shape, dtype and all else that NumPy's arrays have
        if name.startswith("_"):  # names that this object lacks, and hooks that libraries look for in any object
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.array, name)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[index] = _check_lossless(value, self.dtype)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        description = "freed" if self._is_free else f"{self.dtype}{list(self.shape)}"
        return f"jaxmpi.shared({description}, name={self.name!r})"

    # ------------------------------------------------------------ its size

    def resize(self, length: int) -> None:
        """Change the first axis's length; rows that stay keep their values.

        New rows are what the memory holds. If several ranks run the script all must call it. Raises: UsageError: no
        room in shared memory.
        """
        if not self.ndim:
            raise UsageError("resize: got an array without axes; expected a first axis")
        self.reshape((length, *self.shape[1:]))

    def reshape(self, shape: Sequence[int]) -> None:
        """Change the shape and the number of values; bytes keep their order.

        As for `resize`, all ranks that run the script must call it. It raises `UsageError` if there is no room.
        """
        shape = tuple(int(n) for n in shape)
        if min(shape, default=0) < 0:
            raise UsageError(f"reshape: got {shape}; expected lengths >= 0")
        size_bytes, dtype = PAGE + math.prod(shape) * self.dtype.itemsize, self.dtype
        if os.fstat(self._handle).st_size < size_bytes:
            _extend_file(self._handle, size_bytes)
        os.pwrite(self._handle, _header_page(dtype, shape), 0)
        self.refresh()

    def refresh(self) -> None:
        """Look again at what another process may have resized."""
        # An older view keeps the older mapping alive, of the same pages: what is written through it is seen here.
        self._memory = mmap.mmap(self._handle, os.fstat(self._handle).st_size)
        header = json.loads(self._memory[:PAGE].rstrip(b"\0"))
        self._array = np.ndarray(header["shape"], jnp.dtype(header["dtype"]), self._memory, PAGE)

    def free(self) -> None:
        """Free memory and name; processes keep the memory while they map it."""
        if self._is_free:
            return
        self._is_free = True
        del self._array, self._memory
        os.close(self._handle)
        if self._unlinks == os.getpid():  # and not in a child made by os.fork
            Path(self.path).unlink(missing_ok=True)
            atexit.unregister(self.free)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the modules that `free` needs may be gone
            self.free()


def is_shared(leaf: Any) -> bool:
    """Return True if it is a shared array, which is a leaf."""
    return isinstance(leaf, SharedArray)


# ---------------------------------------------------------------- other processes of the job


def open_array(path: str) -> SharedArray:
    """The array of another process of this host."""
    try:
        return SharedArray(os.open(path, os.O_RDWR), path)
    except OSError as error:
        raise UsageError(f"shared: {path} cannot be opened here ({error.strerror}); give the array a name") from error


def map_once(path: str, shape: tuple[int, ...]) -> SharedArray:
    """The same, mapped once: arrays are unpickled by this."""
    if path not in _mapped:
        _mapped[path] = open_array(path)
    array = _mapped[path]
    if array.shape != shape:
        array.refresh()
    return array


def unmap_freed() -> None:
    """Let go of other processes' arrays that these have freed; another may have their path by now."""
    for path, array in [*_mapped.items()]:
        try:
            is_there = os.path.samestat(os.stat(path), os.fstat(array._handle))
        except OSError:
            is_there = False
        if not is_there:
            del _mapped[path]


def unmap() -> None:
    """Let go of all other processes' arrays."""
    _mapped.clear()


# ---------------------------------------------------------------- making one


def shared_by_host(make: Callable[[], SharedArray], name: str) -> SharedArray:
    """The array that the first rank of each host makes and the others map; all ranks call it, and raise together."""
    job = processes()
    arrays: list[SharedArray] = []
    on_all_ranks(job, lambda: arrays.append(make()) if job.local_rank == 0 else None)
    path = job.bcast_from_host_leader(lambda: arrays[0].path)
    on_all_ranks(job, lambda: arrays.append(open_array(path)) if job.local_rank != 0 else None)
    arrays[0].name = name
    return arrays[0]


def create(value: Any, name: str) -> SharedArray:
    """A new array with the value in it; arguments and errors as of `jaxmpi.shared`."""
    content = value() if callable(value) else value
    if is_key(content):
        raise UsageError("shared: got random keys; share jax.random.key_data(keys), and wrap it in the function")
    check_unmasked("shared", content)
    source = np.asarray(content)
    check_jax_takes("shared", source.dtype)
    if name:
        path = _array_path(name)
        _unlink_if_orphaned(path)
        handle = os.open(folder(), os.O_RDWR | os.O_TMPFILE, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)  # held as long as the maker lives: `_unlink_if_orphaned` asks for it
    else:
        handle = os.memfd_create("jaxmpi")
        path = f"/proc/{os.getpid()}/fd/{handle}"
    try:
        _extend_file(handle, PAGE + source.nbytes)
        os.pwrite(handle, _header_page(source.dtype, source.shape), 0)
    except BaseException:  # Ctrl-C too, or the memory would stay with this process
        os.close(handle)
        raise
    array = SharedArray(handle, path, name)
    array.array[...] = source
    if name:
        # The file gets its name when the array is whole, and goes with its maker until then.
        try:
            os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=handle)  # a folder's handle makes it follow links
        except FileExistsError as error:
            raise UsageError(
                f"shared: the name {name!r} is taken ({path}); attach with jaxmpi.shared(name=...)"
            ) from error
        array._unlinks = os.getpid()
        atexit.register(array.free)
    return array


def attach(name: str) -> SharedArray:
    """The array that another process has made under this name."""
    path = _array_path(name)
    try:
        return SharedArray(os.open(path, os.O_RDWR), path, name)
    except OSError as error:
        raise UsageError(f"shared: there is no array named {name!r} on this host ({path}): {error.strerror}") from error


def _array_path(name: str) -> str:
    """Path of the memory of a name."""
    if not re.fullmatch(r"[\w.-]{1,200}", name):
        raise UsageError(f"shared: name: got {name!r}; expected letters, digits, ._-")
    return os.path.join(folder(), f"jaxmpi-array-{name}")


def _unlink_if_orphaned(path: str) -> None:
    """Remove memory whose maker is gone, and with it the maker's lock."""
    # Nobody has made it; it is another user's; or its maker lives.
    with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(file.fileno())):  # else another has just made it anew
            os.unlink(path)


def _header_page(dtype: Any, shape: Sequence[int]) -> bytes:
    """The first page: dtype and shape of what follows."""
    return json.dumps({"dtype": str(dtype), "shape": list(shape)}).encode().ljust(PAGE, b"\0")


def _extend_file(handle: int, size_bytes: int) -> None:
    try:
        reserve(handle, size_bytes)
    except OSError as error:
        raise UsageError(f"shared: no {size_bytes} bytes of shared memory ({error.strerror}); enlarge it") from error


# ---------------------------------------------------------------- numbers that it may hold


def _check_lossless(value: Any, dtype: np.dtype) -> Any:
    """The value, refused if this dtype may lose something of it."""
    if isinstance(value, (bool, int, float, complex)):
        got, fits = type(value).__name__, np.can_cast(np.min_scalar_type(value), dtype, "same_kind")
    else:
        check_unmasked("shared", value)
        value = np.asarray(value)
        _check_numeric("shared", value.dtype)
        got, fits = value.dtype, np.can_cast(value.dtype, dtype, "safe")
    if not fits:
        raise UsageError(f"shared: got {got} for {dtype}, which may lose digits; cast it with .astype")
    return value


def _check_numeric(label: str, dtype: Any) -> None:
    """Refuse dtypes other than numbers; bfloat16 and the like are numbers."""
    if dtype.kind not in "biufc" and not jnp.issubdtype(dtype, jnp.number):
        raise UsageError(f"{label}: got an array of {dtype}; expected numbers")


def check_jax_takes(label: str, dtype: Any) -> None:
    """Refuse dtypes other than numbers, another byte order, and more than 64 bits."""
    _check_numeric(label, dtype)
    if not dtype.isnative or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise UsageError(f"{label}: got an array of {dtype}, which JAX does not take; cast it: x.astype(np.float32)")
