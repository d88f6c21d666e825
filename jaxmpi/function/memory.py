"""Arrays in a host's shared memory, seen by all its processes through NumPy's interface.

The first page of the memory says what lies behind it. The file grows where it is, so that growing copies nothing and
keeps every row. An array without a name has no file: other processes open it through the process that made it, and
nothing is left behind, however a job ends.
"""

import atexit
import json
import math
import mmap
import os
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmpi.config import UsageError, check
from jaxmpi.hostsum import folder, reserve

PAGE = 4096
FREED: list[str] = []  # keys of arrays that this process has freed, until it has told its workers


class SharedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in shared memory. Reads and writes as a NumPy array; `array` is one, without a copy.

    Operators, NumPy's functions and the methods of its arrays give plain arrays; `x += 1` and `out=x` write here. Only
    `resize` and `reshape` are its own: they change the array itself.
    """

    _is_free = True

    def __init__(self, handle: int, path: str, name: str = "") -> None:
        """Map an open file that has its first page."""
        self.name, self.path, self._handle, self._unlinks = name, path, handle, False
        self.key = uuid.uuid4().hex  # a path may come again, once this array has been freed
        self._is_free = False
        self.refresh()

    # ------------------------------------------------------------ as an array

    @property
    def array(self) -> np.ndarray:
        """The memory as a NumPy array; a view that is valid until `free`.

        Raises:
            UsageError: it has been freed.
        """
        check(not self._is_free, f"the shared array {self.name!r} has been freed")
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = lambda x: x.array if isinstance(x, SharedArray) else x  # noqa: E731
        out = options.get("out", ())
        options |= {"out": tuple(map(plain, out))} if out else {}
        result = getattr(ufunc, method)(*map(plain, inputs), **options)
        return out[0] if len(out) == 1 else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what this object lacks, and what libraries ask of any object
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.array, name)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[index] = fitting(value, self.dtype)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        what = "freed" if self._is_free else f"{self.dtype}{list(self.shape)}"
        return f"jaxmpi.shared({what}, name={self.name!r})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the array."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.array.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.array.nbytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes up to which it grows without asking the system for more."""
        return len(self._memory) - PAGE

    # ------------------------------------------------------------ its size

    def resize(self, length: int) -> None:
        """Change the length of the first axis; rows that stay keep their values, others are what the memory holds.

        Where several ranks run the script all must call it. Raises: UsageError: no room in shared memory.
        """
        check(self.ndim > 0, "resize: got an array without axes; expected a first axis")
        check(length >= 0, f"resize: got {length}; expected a length >= 0")
        self.reshape((length, *self.shape[1:]))

    def reshape(self, shape: Sequence[int]) -> None:
        """Change the shape, to more or fewer values too; the memory's bytes stay in their order. As `resize`."""
        shape = tuple(int(n) for n in shape)
        check(all(n >= 0 for n in shape), f"reshape: got {shape}; expected lengths >= 0")
        size_bytes, dtype = PAGE + math.prod(shape) * self.dtype.itemsize, self.dtype
        if os.fstat(self._handle).st_size < size_bytes:
            make_room(self._handle, size_bytes)
        os.pwrite(self._handle, page(dtype, shape), 0)
        self.refresh()

    def refresh(self) -> None:
        """Look again at what another process may have resized."""
        self._memory = mmap.mmap(self._handle, os.fstat(self._handle).st_size)
        said = json.loads(self._memory[:PAGE].rstrip(b"\0"))
        self._array = np.ndarray(said["shape"], jnp.dtype(said["dtype"]), self._memory, PAGE)

    def free(self) -> None:
        """Give the memory back; a name goes away. What still maps it keeps it until it lets go."""
        if self._is_free:
            return
        self._is_free = True
        del self._array, self._memory
        os.close(self._handle)
        FREED.append(self.key)
        if self._unlinks:
            Path(self.path).unlink(missing_ok=True)
            atexit.unregister(self.free)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the modules that `free` needs may be gone
            self.free()

    # ------------------------------------------------------------ for other processes of the job

    def ticket(self) -> dict[str, Any]:
        """What `from_ticket` needs in another process of this host."""
        return {"key": self.key, "path": self.path, "shape": list(self.shape)}


def from_ticket(ticket: dict[str, Any], known: dict[str, SharedArray]) -> SharedArray:
    """The same memory in this process, mapped once."""
    key, path = ticket["key"], ticket["path"]
    if key not in known:
        try:
            known[key] = SharedArray(os.open(path, os.O_RDWR), path)
        except OSError as error:
            raise UsageError(
                f"shared: {path} cannot be opened here ({error.strerror}): processes of one host, in containers of "
                "their own? Give the array a name"
            ) from error
    array = known[key]
    if list(array.shape) != ticket["shape"]:
        array.refresh()
    return array


# ---------------------------------------------------------------- making one


def create(value: Any, name: str, oversize: float, dtype: Any, force: bool) -> SharedArray:
    """A new array with the value in it.

    Raises:
        UsageError: see `jaxmpi.shared`.
    """
    check(1 <= oversize < math.inf, f"shared: oversize: got {oversize}; expected a factor >= 1")
    source = np.asarray(value() if callable(value) else value)
    target = jnp.dtype(source.dtype if dtype is None else dtype)
    check(source.dtype.kind in "biufcV" and source.dtype.names is None, refused(source.dtype))
    values = source.astype(target) if force else fitting(source, target)
    handle, path = open_new(name)
    is_file = not path.startswith("/proc/")
    try:
        make_room(handle, PAGE + math.ceil(oversize * source.size * target.itemsize))
    except UsageError:
        os.close(handle)
        if is_file:
            Path(path).unlink(missing_ok=True)
        raise
    os.pwrite(handle, page(target, source.shape), 0)
    array = SharedArray(handle, path, name)
    array.array[...] = values
    if is_file:
        array._unlinks = True
        atexit.register(array.free)
    return array


def attach(name: str) -> SharedArray:
    """The array that another process has made under this name.

    Raises:
        UsageError: there is none.
    """
    path = path_of(name)
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise UsageError(f"shared: there is no array named {name!r} on this host ({path})") from error
    except PermissionError as error:
        raise UsageError(f"shared: the array named {name!r} is another user's ({path})") from error
    return SharedArray(handle, path, name)


def open_new(name: str) -> tuple[int, str]:
    """An empty file and its path; one without a name is seen through this process only."""
    if not name and hasattr(os, "memfd_create"):
        handle = os.memfd_create("jaxmpi")
        return handle, f"/proc/{os.getpid()}/fd/{handle}"
    path = path_of(name or uuid.uuid4().hex)
    forget_the_dead(path)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), path
    except FileExistsError as error:
        raise UsageError(f"shared: the name {name!r} is taken ({path}); attach with jaxmpi.shared(name=...)") from error


def path_of(name: str) -> str:
    """Where the memory of a name is."""
    check(
        re.fullmatch(r"[\w.-]{1,200}", name) is not None, f"shared: name: got {name!r}; expected letters, digits, ._-"
    )
    return os.path.join(folder(), f"jaxmpi-array-{name}")


def forget_the_dead(path: str) -> None:
    """Remove memory whose maker is gone."""
    try:
        said = json.loads(Path(path).open("rb").read(PAGE).rstrip(b"\0"))
        os.kill(said["pid"], 0)
    except (FileNotFoundError, PermissionError):  # nobody has it; another user has
        return
    except (ProcessLookupError, ValueError):  # its maker has ended, or did before it had said who it is
        Path(path).unlink(missing_ok=True)


def page(dtype: Any, shape: Sequence[int]) -> bytes:
    """The first page: dtype and shape of what follows, and who made it."""
    return json.dumps({"dtype": str(dtype), "shape": list(shape), "pid": os.getpid()}).encode().ljust(PAGE, b"\0")


def make_room(handle: int, size_bytes: int) -> None:
    """Let the file have so many bytes.

    Raises:
        UsageError: there are not as many.
    """
    try:
        reserve(handle, size_bytes)
    except OSError as error:
        raise UsageError(f"shared: no {size_bytes} bytes of shared memory ({error.strerror}); enlarge it") from error


def fitting(value: Any, dtype: np.dtype) -> Any:
    """The value, if nothing of it is lost in this dtype.

    Raises:
        UsageError: something may be.
    """
    if isinstance(value, (bool, int, float, complex)):
        check(np.can_cast(np.min_scalar_type(value), dtype, "same_kind"), lossy(type(value).__name__, dtype))
        return value
    got = np.asarray(value)
    check(got.dtype.kind in "biufcV", refused(got.dtype))
    check(np.can_cast(got.dtype, dtype, "safe"), lossy(got.dtype, dtype))
    return got


def lossy(got: Any, dtype: Any) -> str:
    """The message."""
    return f"shared: got {got} for {dtype}, which may lose digits; cast it with .astype, or shared(..., force=True)"


def refused(dtype: np.dtype) -> str:
    """The message."""
    return f"shared: got an array of {dtype}; expected numbers"
