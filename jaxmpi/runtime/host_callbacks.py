"""Python functions in jitted programs, by an XLA FFI handler made with ctypes.

`jax.pure_callback` and `io_callback` copy arrays, and put an object of this process into the program. Here a program
holds a function's name and nothing else: it is the same on all ranks, can be read from the compilation cache, and can
be exported. XLA runs independent calls in any order and several at once, even on one core; so calls carry an ordered
effect by default. Then they run one after another in the order of the program, through scans, branches and jits in it.
Programs run in the order in which they were started.

On a CPU a function sees XLA's own buffers. On a GPU it sees copies on the host (`jaxmpi.runtime.gpu_buffers`), and
holds up the thread that puts work on the device: what is there goes on, and nothing is added.
"""

import ctypes
import functools
import json
import struct
import traceback
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_void_p, string_at
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.extend.core
import ml_dtypes
import numpy as np
from jax._src import core, effects
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.interpreters import mlir, xla

from jaxmpi.core.errors import TrainingError, UsageError, check, lookup
from jaxmpi.runtime import failures, gpu_buffers
from jaxmpi.runtime.gpu_buffers import Buffer

# (operands, results, **attributes) -> None: read the first, which are read-only, and fill the second.
Function = Callable[..., None]
TARGET = "jaxmpi_python"
# `disabled_checks` of `jax.export.export`: calls of Python, and of buckets' thread (`allreduce/host_engine.c`).
EXPORTABLE = tuple(jax.export.DisabledSafetyCheck.custom_call(name) for name in (TARGET, "jaxmpi_beside"))
_functions: dict[str, tuple[Function, bool]] = {}  # by name, and whether their errors end the job


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
    _functions[name] = function, ends_job


def forget(name: str) -> None:
    """Remove a function; a program that still calls it gets an error."""
    _functions.pop(name, None)


def can_go(dtype: Any) -> bool:
    """Return True if arrays of this dtype can go to a function; random keys, and less than 8 bits, cannot."""
    return not jax.numpy.issubdtype(dtype, jax.dtypes.extended) and np.dtype(dtype) in DTYPES.values()


def sees_copies() -> bool:
    """Return True if functions see copies of a GPU's arrays, not XLA's own buffers."""
    return jax.default_backend() != "cpu"


# ---------------------------------------------------------------- calls in a program


# The text of effects in JAX's error about a program on several devices.
ONE_DEVICE = (
    "jaxmpi's calls between processes: a program that makes them runs on one device of its process, and got an array "
    "on several; jax.device_put(x, jax.local_devices()[0]) puts it on one"
)


@dataclass(frozen=True)
class OrderedEffect(effects.Effect):
    """Effect that keeps calls in order."""

    def __repr__(self) -> str:
        return ONE_DEVICE


@dataclass(frozen=True)
class Kept(effects.Effect):
    """Effect that keeps calls whose results are unused; data alone orders them."""


def admit(effect: effects.Effect, *, is_ordered: bool = True) -> effects.Effect:
    """Let JAX lower an effect, also in branches, loops and custom derivatives."""
    for kind in ("lowerable", "control_flow_allowed", "custom_derivatives_allowed", *["ordered"] * is_ordered):
        getattr(effects, f"{kind}_effects").add_type(type(effect))
    return effect


ORDERED, KEPT = admit(OrderedEffect()), admit(Kept(), is_ordered=False)


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
        in_place: pairs (operand, result) that may share a buffer; XLA copies an operand that is used elsewhere.
        effect: calls with one effect run in order; give another library's to be ordered among its calls. KEPT: a call
            runs as soon as its operands are there, concurrently with others. None: so it does, and may be left out if
            nobody uses its results.
        attributes: constants of the program, passed on by name.

    Communicates: what the function does.
    """
    text = json.dumps([name, attributes], sort_keys=True)
    shapes = tuple(ShapedArray(r.shape, r.dtype) for r in results)
    return _python_p.bind(*operands, results=shapes, effect=effect, in_place=tuple(in_place), text=text)


def handler_primitive(target: str, platforms: Sequence[str] = ("cpu",)) -> Any:
    """A JAX primitive that calls the FFI handler registered as `target`: operands -> results.

    Its parameters are `results`, of `ShapedArray`s; `effect`, which orders calls, as of `call`; and perhaps `in_place`,
    pairs of operands and results that share a buffer, and for the handler `words`, i32, and `text`. With
    `words_in_main` a program also calls the handler with these words when it begins, whatever branch it takes.
    """
    made = jax.extend.core.Primitive(target)
    made.multiple_results = True

    def lower(
        ctx: mlir.LoweringRuleContext,
        *operands: Any,
        results: tuple,
        effect: effects.Effect | None,
        words: tuple[int, ...] = (),
        in_place: tuple[tuple[int, int], ...] = (),
        text: str = "",
        words_in_main: tuple[int, ...] = (),
    ) -> list:
        if words_in_main:
            operations = ctx.module_context.module.body.operations
            [main] = [f for f in operations if ir.StringAttr(f.attributes["sym_name"]).value == "main"]
            with ir.InsertionPoint.at_block_begin(main.regions[0].blocks[0]):
                first = jax.ffi.ffi_lowering(target, has_side_effect=True)
                first(ctx.replace(avals_in=[], avals_out=[]), words=np.array(words_in_main, np.int32))
        attributes: dict[str, Any] = {"words": np.array(words, np.int32)} if words else {}
        attributes |= {"text": text} if text else {}
        lowering = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=dict(in_place))
        if effect in (None, KEPT):
            return list(lowering(ctx, *operands, **attributes))
        # An ordered effect's token is the last operand and result. JAX knows its type by identity; it moved in 0.11.
        token = [getattr(jax.ffi, "abstract_token", None) or core.abstract_token]
        inner = ctx.replace(avals_in=[*ctx.avals_in, *token], avals_out=[*ctx.avals_out, *token])
        *values, after = lowering(inner, *operands, ctx.tokens_in.get(effect), **attributes)
        ctx.set_tokens_out(mlir.TokenSet({effect: after}))
        return values

    made.def_impl(functools.partial(xla.apply_primitive, made))
    made.def_effectful_abstract_eval(lambda *_, results, effect, **__: (list(results), {effect} if effect else set()))
    for platform in platforms:
        mlir.register_lowering(made, lower, platform=platform)
    return made


_python_p = handler_primitive(TARGET, ("cpu", "cuda"))


# ---------------------------------------------------------------- XLA's C interface (xla/ffi/api/c_api.h)
#
# A handler is C: it takes a pointer to a call frame and returns a pointer to an error, or null. The frame has the
# stage, operands and results as buffers, the program's constants as attributes, and a table of XLA's functions. Each
# line below lists the fields of one of the header's structures, which begin with their size and a list of extensions. A
# new minor version adds fields at the end, so XLA's structure may be longer than the one here. XLA refuses a handler of
# another major version when it is registered. Fields of ctypes structures would take longer to read than all of these.

MAJOR, MINOR = 0, 3  # version of the header followed here; 0.5 has the same fields in the same places
EXECUTE, METADATA, INTERNAL, TOKEN = 3, 1, 13, 17  # stage, kind of extension, error code, type of a buffer
FRAME = struct.Struct("@NPPPi NPqPP NPqPP NPqPPP")  # extension, api, context, stage; operands; results; attributes
BUFFER = struct.Struct("@NPiPqP")  # struct_size, extension, dtype, data, rank, dims
EXTENSION = struct.Struct("@NiPP")  # struct_size, kind, next; of a question for metadata also where they go
VERSION_AT = 24  # bytes before major and minor in XLA_FFI_Metadata
API_CREATE_ERROR, API_GET_STREAM = 48, 80  # bytes before these functions in XLA_FFI_Api
ARGUMENTS = struct.Struct("@NPPP")  # struct_size, extension; message and code, or context and stream

_NAMES = {  # by the header's numbers; those of 1, 2 and 4 bits are left out: XLA may pack them
    **dict(enumerate(("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), 1)),
    **{10: "float16", 11: "float32", 12: "float64", 15: "complex64", 16: "bfloat16", 18: "complex128"},
    **{19: "float8_e5m2", 20: "float8_e4m3fn", 23: "float8_e4m3b11fnuz", 24: "float8_e5m2fnuz"},
    **{25: "float8_e4m3fnuz", 28: "float8_e4m3", 29: "float8_e3m4", 33: "float8_e8m0fnu"},
}
DTYPES = {number: np.dtype(getattr(ml_dtypes, name, name)) for number, name in _NAMES.items()}


def _handler_of(move: Callable[..., None]) -> Any:
    """Make XLA's entry point; `move` calls a function on a call's buffers."""

    @ctypes.CFUNCTYPE(c_void_p, c_void_p)
    def handler(address: int) -> int | None:
        _, extension, api, context, stage, *lists = FRAME.unpack(string_at(address, FRAME.size))
        _, _, operand_count, _, operands, _, _, result_count, _, results, _, _, _, _, _, attributes = lists
        if extension:
            _, kind, _, metadata = EXTENSION.unpack(string_at(extension, EXTENSION.size))
            if kind == METADATA:  # XLA asks for the header's version
                (c_int * 2).from_address(metadata + VERSION_AT)[:] = MAJOR, MINOR
                return None
        if stage != EXECUTE:  # earlier stages have no data
            return None
        ends_job = False
        try:
            [text] = _read("P", attributes)
            name, options = _decode(string_at(*_read("PN", text)))
            function, ends_job = lookup(_functions, name, "Python function of a program")
            run = functools.partial(function, **options)
            move(run, _buffers(operand_count, operands), _buffers(result_count, results), api, context)
        except BaseException as error:  # ctypes swallows exceptions, so none may leave
            if ends_job:  # the other ranks would wait
                failures.fail(error, error.__traceback__)
            message = c_char_p(_describe(error).encode())
            given = ARGUMENTS.pack(ARGUMENTS.size, 0, ctypes.cast(message, c_void_p).value, INTERNAL)
            return _function(api, API_CREATE_ERROR)(given)  # XLA takes the error over
        return None

    return handler


@functools.lru_cache(maxsize=1024)
def _decode(text: bytes) -> list:
    return json.loads(text)


def _function(api: int, place: int) -> Callable[..., int]:
    """A function of XLA's table."""
    [address] = _read("P", api + place)
    return ctypes.CFUNCTYPE(c_void_p, c_char_p)(address)


def _move_on_cpu(run: Function, operands: list[Buffer], results: list[Buffer], api: int, context: int) -> None:
    run([x.array(is_written=False) for x in operands], [x.array(is_written=True) for x in results])


def _move_on_gpu(run: Function, operands: list[Buffer], results: list[Buffer], api: int, context: int) -> None:
    arguments = ctypes.create_string_buffer(ARGUMENTS.pack(ARGUMENTS.size, 0, context, 0), ARGUMENTS.size)
    failed = _function(api, API_GET_STREAM)(arguments)
    check(not failed, "XLA does not give the stream of the GPU on which it calls Python")
    with gpu_buffers.on_host(ARGUMENTS.unpack(arguments.raw)[-1], operands, results) as (read, written):
        run(read, written)


def _buffers(count: int, pointers: int) -> list[Buffer]:
    """All but tokens."""
    found = []
    for pointer in _read(f"{count}P", pointers):
        _, _, number, data, rank, dims = BUFFER.unpack(string_at(pointer, BUFFER.size))
        if number == TOKEN:
            continue
        check(number in DTYPES, f"XLA's type number {number} cannot go to Python; cast it to 8 bits or more")
        found.append(Buffer(DTYPES[number], _read(f"{rank}q", dims), data))
    return found


def _read(format: str, address: int) -> tuple[int, ...]:
    """Numbers in memory; none if there is no address."""
    return struct.unpack(format, string_at(address, struct.calcsize(format))) if address else ()


def _describe(error: BaseException) -> str:
    """The error's type, message and rank; its line follows, unless it is a `UsageError` or `TrainingError`."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, (UsageError, TrainingError)) else f", {place.filename}:{place.lineno}"
    return f"{type(error).__name__}: {error} [{failures.describe_rank()}{where}]"


_HANDLERS = {"cpu": _handler_of(_move_on_cpu), "CUDA": _handler_of(_move_on_gpu)}  # by XLA's name of the platform
for _platform, _handler in _HANDLERS.items():
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(_handler, c_void_p).value), platform=_platform)
