"""Python functions in jitted programs, by XLA FFI handlers made with ctypes.

No compiler is needed. A program holds a function's name and nothing of this process: it is the same on all ranks, can
be read from the compilation cache, and can be exported. XLA runs independent calls in any order and several at once,
even on one core; so calls carry an ordered effect by default. Then they run one after another in the order of the
program, through scans, branches and jits in it. Programs run in the order in which they were started.

On a CPU a function sees XLA's own buffers. On a GPU it sees copies on the host (`jaxmpi.runtime.gpu_buffers`), and
holds up the thread that puts work on the device: what is there goes on, and nothing is added.
"""

import ctypes
import functools
import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p, cast, string_at
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.extend.core
import ml_dtypes
import numpy as np
from jax._src import core, effects
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.interpreters import mlir, xla

from jaxmpi.core.errors import TrainingError, UsageError, check, lookup
from jaxmpi.runtime import failures, gpu_buffers
from jaxmpi.runtime.gpu_buffers import Buffer
from jaxmpi.runtime.process import my_rank

# (operands, results, **attributes) -> None: read the first, which are read-only, and fill the second.
Function = Callable[..., None]
TARGET = "jaxmpi_python"
# `disabled_checks` of `jax.export.export`: calls of Python, and of buckets' thread (`allreduce/host_engine.c`).
EXPORTABLE = tuple(jax.export.DisabledSafetyCheck.custom_call(name) for name in (TARGET, "jaxmpi_beside"))
_functions: dict[str, Function] = {}
_ends_job: set[str] = set()  # names of those whose errors end the job
_thread = threading.local()


def register(name: str, function: Function, ends_job: bool = False) -> None:
    """Let programs call `function(operands, results, **attributes)` by `name`, from any XLA thread.

    operands: read-only views of XLA's own buffers, on a GPU of copies; results: views to fill, aligned to 64 bytes,
    whose content is undefined before. Views must not outlive the call. Any dtype and shape, size 0 included.

    An exception that the function raises becomes an XLA error with type, message, rank and line. It is raised where the
    program's results are waited for. With `ends_job` the exception ends all ranks at once, through `failures.fail`. On
    a GPU JAX raises such an error again in each later program that has calls in order: the process has to start anew.

    Raises:
        UsageError: the name is taken.
    """
    if name in _functions:
        raise UsageError(f"a Python function {name!r} is registered already; forget() it first")
    _functions[name] = function
    if ends_job:
        _ends_job.add(name)
    unavailable_reason()  # XLA knows the handler from now on: a program from the cache need not be traced here


def forget(name: str) -> None:
    """Remove a function; a program that still calls it gets an error."""
    _functions.pop(name, None)
    _ends_job.discard(name)


def can_go(dtype: Any) -> bool:
    """Return True if arrays of this dtype can go to a function; random keys, and less than 8 bits, cannot."""
    return not jax.numpy.issubdtype(dtype, jax.dtypes.extended) and np.dtype(dtype) in DTYPES.values()


def sees_copies() -> bool:
    """Return True in a function called on copies of GPU arrays."""
    return getattr(_thread, "sees_copies", False)


def copy_unless_shared(source: np.ndarray, to: np.ndarray) -> None:
    """Copy `source` into `to`, unless `in_place` gave them one buffer."""
    if source.ctypes.data != to.ctypes.data:
        np.copyto(to, source)


# ---------------------------------------------------------------- calls in a program


@dataclass(frozen=True)
class OrderedEffect(effects.Effect):
    """Effect that keeps calls in order."""


@dataclass(frozen=True)
class Kept(effects.Effect):
    """Effect that keeps calls whose results are unused; data alone orders them."""


@dataclass(frozen=True)
class Checked(effects.Effect):
    """Effect that keeps a compile-time check, and does nothing at run time."""


def admit(effect: effects.Effect, *, is_ordered: bool = True, may_repeat: bool = False) -> effects.Effect:
    """Let JAX lower an effect, also in branches, loops, custom derivatives and, if it may repeat, `jax.checkpoint`."""
    kinds = ["lowerable", "control_flow_allowed", "custom_derivatives_allowed"]
    kinds += ["ordered"] * is_ordered + ["remat_allowed"] * may_repeat
    for kind in kinds:
        getattr(effects, f"{kind}_effects").add_type(type(effect))
    return effect


ORDERED, KEPT = admit(OrderedEffect()), admit(Kept(), is_ordered=False)
CHECKED = admit(Checked(), is_ordered=False, may_repeat=True)


def call(
    name: str,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    in_place: Sequence[tuple[int, int]] = (),
    effect: effects.Effect | None = ORDERED,
    **attributes: int | float | str,
) -> list[jax.Array]:
    """Call the registered function; its results, once it has filled them.

    Args:
        name: what it is registered under in the process that runs the program.
        operands: arrays, row-major for the function.
        results: shapes and dtypes.
        in_place: pairs (operand, result) that may share a buffer; XLA copies an operand that is used elsewhere.
        effect: calls with one effect run in order; give another library's to be ordered among its calls. KEPT: a call
            runs as soon as its operands are there, concurrently with others. None: so it does, and may be left out if
            nobody uses its results.
        attributes: constants of the program, passed on by name.

    If XLA's interface is not the one this file knows, or on other devices, it is `io_callback`, ordered, with copies.

    Communicates: what the function does.
    """
    if unavailable_reason():

        def run(*arrays: jax.Array) -> list[np.ndarray]:
            filled = [np.empty(r.shape, r.dtype) for r in results]
            try:
                _run(name, [np.asarray(a) for a in arrays], filled, attributes)
            except Exception as error:
                raise RuntimeError(_describe(error)) from error
            return filled

        return io_callback(run, list(results), *operands, ordered=True)
    constants = tuple(sorted({**attributes, "name": name}.items()))
    like = tuple(ShapedArray(r.shape, r.dtype) for r in results)
    return _python_p.bind(*operands, results=like, in_place=tuple(in_place), effect=effect, constants=constants)


_python_p = jax.extend.core.Primitive(TARGET)
_python_p.multiple_results = True
_python_p.def_impl(functools.partial(xla.apply_primitive, _python_p))


@_python_p.def_effectful_abstract_eval
def _abstract(*operands: Any, results: tuple, effect: effects.Effect | None, **_: Any) -> tuple[list, set]:
    return list(results), {effect} if effect else set()


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, results: Any, in_place: Any, effect: Any, constants: Any
) -> list:
    typed = {k: np.int64(v) if isinstance(v, int) else v for k, v in constants}
    return lower_in_order(ctx, TARGET, operands, effect, in_place, **typed)


mlir.register_lowering(_python_p, _lower, platform="cpu")
mlir.register_lowering(_python_p, _lower, platform="cuda")


def lower_in_order(
    ctx: mlir.LoweringRuleContext,
    target: str,
    operands: Sequence[Any],
    effect: effects.Effect | None,
    in_place: Sequence[tuple[int, int]] = (),
    **attributes: Any,
) -> list:
    """Lower to a handler's call; an ordered effect's token is its last operand and result."""
    lowering = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=dict(in_place))
    if effect in (None, KEPT):
        return list(lowering(ctx, *operands, **attributes))
    # JAX knows the token's type by identity; it moved in 0.11.
    token = [getattr(jax.ffi, "abstract_token", None) or core.abstract_token]
    inner = ctx.replace(avals_in=[*ctx.avals_in, *token], avals_out=[*ctx.avals_out, *token])
    *values, after = lowering(inner, *operands, ctx.tokens_in.get(effect), **attributes)
    ctx.set_tokens_out(mlir.TokenSet({effect: after}))
    return values


# ---------------------------------------------------------------- XLA's C interface (xla/ffi/api/c_api.h)
#
# A handler is C: it takes a pointer to a call frame and returns a pointer to an error, or null. The frame has the
# stage, operands and results as buffers, the program's constants as attributes, and a table of XLA's functions. Each
# type below lists the fields of one of the header's structures. Most begin with their size and a list of extensions. A
# new minor version adds fields at the end, so XLA's structure may be longer than the one here; a shorter one must not
# be read.

MAJOR, MINOR = 0, 3  # version of the header followed here; 0.5 has the same fields in the same places
EXECUTE, METADATA, STRING, INTERNAL = 3, 1, 4, 13  # stage, extension, kind of attribute, error code
TOKEN = 17
# XLA_FFI_Buffer: struct_size, extension, dtype, data, rank, dims. A program may have hundreds of them, and a field of a
# ctypes structure takes longer to read than all of these.
BUFFER = struct.Struct("@NPiPqP")


def _structure(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": [*fields.items()]})


_BASE = {"struct_size": c_size_t, "extension": c_void_p}
FfiExtension = _structure("XLA_FFI_Extension_Base", struct_size=c_size_t, kind=c_int, next=c_void_p)
FfiApiVersion = _structure("XLA_FFI_Api_Version", **_BASE, major=c_int, minor=c_int)
FfiMetadata = _structure("XLA_FFI_Metadata", struct_size=c_size_t, version=FfiApiVersion, traits=c_uint32)
FfiMetadataExtension = _structure("XLA_FFI_Metadata_Extension", base=FfiExtension, metadata=POINTER(FfiMetadata))
FfiByteSpan = _structure("XLA_FFI_ByteSpan", text=c_void_p, length=c_size_t)
FfiScalar = _structure("XLA_FFI_Scalar", dtype=c_int, value=c_void_p)
FfiBuffers = _structure("XLA_FFI_Args", **_BASE, size=c_int64, kinds=POINTER(c_int), items=c_void_p)  # XLA_FFI_Buffer**
FfiAttributes = _structure(
    "XLA_FFI_Attrs",
    **_BASE,
    size=c_int64,
    kinds=POINTER(c_int),
    names=POINTER(POINTER(FfiByteSpan)),
    items=POINTER(c_void_p),
)
FfiCreateError = _structure("XLA_FFI_Error_Create_Args", **_BASE, message=c_char_p, code=c_int)
FfiGetStream = _structure("XLA_FFI_Stream_Get_Args", **_BASE, context=c_void_p, stream=c_void_p)
FfiApi = _structure(  # its beginning
    "XLA_FFI_Api",
    **_BASE,
    version=FfiApiVersion,
    internal=c_void_p,
    create_error=ctypes.CFUNCTYPE(c_void_p, POINTER(FfiCreateError)),
    get_message=c_void_p,
    destroy=c_void_p,
    register=c_void_p,
    get_stream=ctypes.CFUNCTYPE(c_void_p, POINTER(FfiGetStream)),
)
FfiCallFrame = _structure(  # as far as it is read
    "XLA_FFI_CallFrame",
    struct_size=c_size_t,
    extension=POINTER(FfiExtension),
    api=POINTER(FfiApi),
    context=c_void_p,
    stage=c_int,
    operands=FfiBuffers,
    results=FfiBuffers,
    attributes=FfiAttributes,
)
_NAMES = {  # by the header's numbers; those of 1, 2 and 4 bits are left out: XLA may pack them
    **dict(enumerate(("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), 1)),
    **{10: "float16", 11: "float32", 12: "float64", 15: "complex64", 16: "bfloat16", 18: "complex128"},
    **{19: "float8_e5m2", 20: "float8_e4m3fn", 23: "float8_e4m3b11fnuz", 24: "float8_e5m2fnuz"},
    **{25: "float8_e4m3fnuz", 28: "float8_e4m3", 29: "float8_e3m4", 33: "float8_e8m0fnu"},
}
DTYPES = {number: np.dtype(getattr(ml_dtypes, name, name)) for number, name in _NAMES.items()}


def handler_of(run: Callable[[Any, str, dict[str, Any]], None]) -> Any:
    """Make XLA's entry point; `run` calls the function of the given name."""

    @ctypes.CFUNCTYPE(c_void_p, POINTER(FfiCallFrame))
    def handler(frame: Any) -> int | None:
        try:  # ctypes swallows exceptions, so none may leave; None is success
            return _handle(frame.contents, run)
        except BaseException as error:
            made = FfiCreateError(ctypes.sizeof(FfiCreateError), None, _describe(error).encode(), INTERNAL)
            return frame.contents.api.contents.create_error(made)  # which XLA takes over

    return handler


def _handle(frame: Any, run: Callable[[Any, str, dict[str, Any]], None]) -> None:
    if frame.extension and frame.extension.contents.kind == METADATA:  # XLA asks for the header's version
        version = cast(frame.extension, POINTER(FfiMetadataExtension)).contents.metadata.contents.version
        version.major, version.minor = MAJOR, MINOR
    elif frame.stage == EXECUTE:  # earlier stages have no data
        need = ctypes.sizeof(FfiCallFrame)
        check(frame.struct_size >= need, f"XLA's call frame has {frame.struct_size} bytes, expected {need} or more")
        attributes = _decode(frame.attributes)
        run(frame, attributes.pop("name"), attributes)


def _run_on_cpu(frame: Any, name: str, attributes: dict[str, Any]) -> None:
    operands = [x.array(is_written=False) for x in _buffers(frame.operands)]
    _run(name, operands, [x.array(is_written=True) for x in _buffers(frame.results)], attributes)


def _run_on_gpu(frame: Any, name: str, attributes: dict[str, Any]) -> None:
    query = FfiGetStream(ctypes.sizeof(FfiGetStream), None, frame.context, None)
    check(not frame.api.contents.get_stream(query), "XLA does not give the stream of the GPU on which it calls Python")
    try:
        buffers = _buffers(frame.operands), _buffers(frame.results)
        with gpu_buffers.on_host(query.stream, *buffers) as (operands, results):
            _thread.sees_copies = True
            _run(name, operands, results, attributes)
    except gpu_buffers.DriverError as error:  # a copy has failed; the other ranks would wait
        _end_job_if_asked(name, error)
        raise
    finally:
        _thread.sees_copies = False


HANDLERS = {"cpu": handler_of(_run_on_cpu), "CUDA": handler_of(_run_on_gpu)}  # by XLA's name of the platform


def _run(name: str, operands: list[np.ndarray], results: list[np.ndarray], attributes: dict[str, Any]) -> None:
    try:
        lookup(_functions, name, "Python function of a program")(operands, results, **attributes)
    except BaseException as error:
        _end_job_if_asked(name, error)
        raise


def _end_job_if_asked(name: str, error: BaseException) -> None:
    if name in _ends_job:
        failures.fail(error, error.__traceback__)


def _buffers(buffers: Any) -> list[Buffer]:
    """All but tokens."""
    found = []
    for pointer in _read(f"{buffers.size}P", buffers.items):
        _, _, number, data, rank, dims = BUFFER.unpack(string_at(pointer, BUFFER.size))
        if number == TOKEN:
            continue
        check(number in DTYPES, f"XLA's type number {number} cannot go to Python; cast it to 8 bits or more")
        found.append(Buffer(DTYPES[number], _read(f"{rank}q", dims), data))
    return found


def _read(format: str, address: int | None) -> tuple[int, ...]:
    """Numbers in memory; none if there is no address."""
    return struct.unpack(format, string_at(address, struct.calcsize(format))) if address else ()


def _decode(attributes: Any) -> dict[str, Any]:
    """Strings and scalars by name."""
    found = {}
    for i in range(attributes.size):
        item = attributes.items[i]
        if attributes.kinds[i] == STRING:
            value = _text(cast(item, POINTER(FfiByteSpan)).contents)
        else:
            scalar = cast(item, POINTER(FfiScalar)).contents
            dtype = DTYPES[scalar.dtype]
            value = np.frombuffer(string_at(scalar.value, dtype.itemsize), dtype)[0].item()
        found[_text(attributes.names[i].contents)] = value
    return found


def _text(span: Any) -> str:
    return string_at(span.text, span.length).decode()


def _describe(error: BaseException) -> str:
    """The error's type, message and rank; its line follows, unless it is a `UsageError` or `TrainingError`."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, (UsageError, TrainingError)) else f", {place.filename}:{place.lineno}"
    return f"{type(error).__name__}: {error} [{failures.describe_rank()}{where}]"


# ---------------------------------------------------------------- whether XLA's interface is the one known here


def why_copies() -> str:
    """Why functions do not see XLA's own buffers; empty if they do."""
    return unavailable_reason() or ("arrays of a GPU are copied to the host" if jax.default_backend() != "cpu" else "")


@functools.cache
def unavailable_reason() -> str | None:
    """Reason why calls go through `io_callback`; None if the handler works.

    JAXMPI_FFI=off asks for `io_callback`.
    """
    if os.environ.get("JAXMPI_FFI") == "off":
        return "JAXMPI_FFI is off"
    is_cuda = "cuda" in jax.local_devices()[0].client.platform_version.lower()
    if jax.default_backend() != "cpu" and not is_cuda:
        return f"the backend is {jax.default_backend()}"
    try:
        for platform in HANDLERS if is_cuda else ["cpu"]:
            capsule = jax.ffi.pycapsule(cast(HANDLERS[platform], c_void_p).value)
            jax.ffi.register_ffi_target(TARGET, capsule, platform=platform)
        _probe()
    except Exception as error:  # an interface of another age may fail in any way, and there is another way
        reason = f"{type(error).__name__}: {error}"
        if my_rank() == 0:
            print(f"jaxmpi: Python in programs goes through io_callback, with copies: {reason}", file=sys.stderr)
        return reason
    return None


def _probe() -> None:
    """Double three numbers through the handler."""
    name, x = "the probe of handlers", np.arange(3, dtype=np.float32)
    _functions[name] = lambda operands, results: np.add(*operands, *operands, out=results[0])
    options = {
        "results": (ShapedArray(x.shape, x.dtype),),
        "in_place": (),
        "effect": ORDERED,
        "constants": (("name", name),),
    }
    try:
        with jax.ensure_compile_time_eval():  # also while the caller is traced
            got = np.asarray(jax.jit(lambda v: _python_p.bind(v, **options))(x)[0])
    finally:
        forget(name)
    check((got == 2 * x).all(), f"XLA's FFI gave {got}, expected {2 * x}; jax {jax.__version__} is not known to work")
