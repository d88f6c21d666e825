"""Python functions as XLA handlers: what they see, in which order they run, and what becomes of their errors."""

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import dispatch

from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import gpu_buffers, host_callbacks
from jaxmpi.runtime.gpu_buffers import Buffer

on_cpus = pytest.mark.skipif(jax.default_backend() != "cpu", reason="on GPUs functions see copies")
SHAPES = [(), (1,), (0,), (2, 0, 3), (7,), (3, 5, 2), (1, 1, 1, 1, 1, 2)]


@pytest.fixture
def python() -> Iterator[Callable]:
    """A function under a name of its own, called like `call` without the name."""
    names = []

    def made(function: Callable, **options) -> Callable:
        names.append(f"{function.__name__} {len(names)}")
        host_callbacks.register(names[-1], function, **options)
        return lambda operands, results, name=names[-1], **more: host_callbacks.call(name, operands, results, **more)

    yield made
    for name in names:
        host_callbacks.forget(name)
    dispatch.runtime_tokens.clear()  # on a GPU the token of a program that has failed fails those behind it


def copy(operands, results):
    for operand, result in zip(operands, results, strict=True):
        assert (operand.shape, operand.dtype) == (result.shape, result.dtype)
        np.copyto(result, operand)


@pytest.mark.parametrize("dtype", host_callbacks.DTYPES.values(), ids=str)
def test_every_dtype_and_shape_arrives_and_comes_back(dtype, python):
    with jax.enable_x64(dtype.itemsize >= 8):
        rng = np.random.default_rng(0)
        bits = [rng.integers(0, 2 if dtype.kind == "b" else 64, (*shape, dtype.itemsize), np.uint8) for shape in SHAPES]
        arrays = [jnp.asarray(b.view(dtype)[..., 0]) for b in bits]
        assert {array.dtype for array in arrays} == {dtype}
        call = python(copy)
        for back, array in zip(jax.jit(lambda x: call(x, x))(arrays), arrays, strict=True):
            assert (back.shape, back.dtype) == (array.shape, array.dtype)
            assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


def test_types_smaller_than_a_byte_are_refused(python):
    call, x = python(copy), jnp.ones(4, jnp.int4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="cannot go to Python; cast it to 8 bits"):
        jax.block_until_ready(jax.jit(lambda v: call([v], [v]))(x))


@on_cpus
def test_views_are_xlas_own_buffers(python):
    seen = {}

    def look(operands, results):
        seen["operand"], seen["result"] = operands[0].ctypes.data, results[0].ctypes.data
        seen["writeable"] = operands[0].flags.writeable, results[0].flags.writeable
        results[0][...] = 3

    call, x = python(look), jnp.ones((1000, 3))
    [y] = jax.jit(lambda v: call([v], [v]))(x)
    assert (np.asarray(y) == 3).all()
    assert seen == {
        "operand": x.unsafe_buffer_pointer(),
        "result": y.unsafe_buffer_pointer(),
        "writeable": (False, True),
    }
    assert seen["result"] % 64 == 0


def test_in_place_results_take_the_operands_buffers(python):
    def check_same(operands, results):
        assert operands[0].ctypes.data == results[0].ctypes.data
        results[0][...] = operands[0] + 1

    call, x = python(check_same), jnp.arange(100.0)
    [y] = jax.jit(lambda v: call([v * 2], [v], in_place=[(0, 0)]))(x)
    assert (np.asarray(y) == 2 * np.arange(100.0) + 1).all()
    twice = jax.jit(lambda v: (v, call([v], [v], in_place=[(0, 0)])[0]))(x)  # XLA copies what is needed elsewhere
    assert (np.asarray(twice[0]) == np.arange(100)).all()
    assert (np.asarray(twice[1]) == np.arange(100) + 1).all()


class FakeDriver:
    """CUDA's driver for memory of the host, with a list of what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.memory: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.asked.append(name)
            if name.startswith("cuMemcpy"):
                to, source, size_bytes, _ = arguments
                ctypes.memmove(to, source, size_bytes)
            if name == "cuMemHostAlloc":
                self.memory.append(ctypes.create_string_buffer(arguments[1]))
                arguments[0]._obj.value = ctypes.addressof(self.memory[-1])
            return 0

        return call


@pytest.fixture
def cuda(monkeypatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(gpu_buffers, "driver", lambda: driver)
    monkeypatch.setattr(gpu_buffers, "_kept", [])
    return driver


def on_gpu(array: np.ndarray) -> Buffer:
    return Buffer(array.dtype, array.shape, array.ctypes.data)


def test_buffers_of_a_gpu_are_copied_behind_its_work_and_back(cuda):
    x, y, both, empty = np.arange(3.0), np.zeros((2, 2), np.int8), np.arange(5.0), np.zeros((0, 3))
    with gpu_buffers.on_host(7, [on_gpu(a) for a in (x, both, empty)], [on_gpu(a) for a in (y, both, empty)]) as arrays:
        [a, b, none], [c, d, nothing] = arrays
        assert (a.tolist(), b.tolist(), none.shape, nothing.shape) == ([0, 1, 2], [0, 1, 2, 3, 4], (0, 3), (0, 3))
        assert (a.flags.writeable, c.flags.writeable) == (False, True)
        assert b.ctypes.data == d.ctypes.data  # one buffer of the GPU is one array
        assert all(array.ctypes.data % 64 == a.ctypes.data % 64 for array in (b, c))
        c[...], d[...] = 9, d + 1
        assert (y.tolist(), both.tolist()) == ([[0, 0], [0, 0]], [0, 1, 2, 3, 4])
    assert (y.tolist(), both.tolist()) == ([[9, 9], [9, 9]], [1, 2, 3, 4, 5])
    assert (cuda.asked.count("cuMemcpyDtoHAsync_v2"), cuda.asked.count("cuStreamSynchronize")) == (2, 2)


# ---------------------------------------------------------------- order


@pytest.fixture
def marks(python) -> tuple[list[int], Callable]:
    """Return what ran, in order, and a call that notes its number; f32[...] in and out."""
    seen: list[int] = []
    busy: list[int] = []

    def note(operands, results, number):
        busy.append(number)
        time.sleep(0.001)
        assert busy == [number], "two calls at once"
        busy.pop()
        seen.append(number)
        copy(operands, results)

    call = python(note)
    return seen, lambda x, number: call([x], [x], number=number)[0]


def test_independent_calls_run_one_by_one_in_program_order(marks):
    seen, mark = marks

    @jax.jit
    def program(x):  # the later calls' operands are ready first
        late = [mark(jnp.sin(x * i) @ x if i % 3 == 0 else x + i, i) for i in range(12)]
        return [y @ y for y in late]

    for _ in range(3):
        seen.clear()
        jax.block_until_ready(program(jnp.ones((300, 300))))
        assert seen == list(range(12))


def test_order_holds_in_loops_branches_and_inner_jits(marks):
    seen, mark = marks
    inner = jax.jit(lambda x: mark(x, 2))

    @jax.jit
    def program(x):
        def body(carry, _):
            mark(x, 1)  # of no use to the result
            return inner(carry), None

        y = jax.lax.scan(body, x, length=2)[0]
        y = jax.lax.cond(y[0] > 0, lambda v: mark(v, 3), lambda v: mark(v, 4), y)
        return mark(x, 5) + y

    jax.block_until_ready(program(jnp.ones(3)))
    assert seen == [1, 2, 1, 2, 3, 5]


# ---------------------------------------------------------------- errors


def boom(operands, results):
    raise ValueError("leaf conv1/kernel is odd")


def test_an_exception_is_an_xla_error_with_type_message_and_rank(python):
    call, works, x = python(boom), python(copy), jnp.ones(3)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(lambda v: call([v], [v]))(x))
    assert "ValueError: leaf conv1/kernel is odd [rank 0/1 on " in str(caught.value)
    assert f"{Path(__file__).name}:{boom.__code__.co_firstlineno + 1}]" in str(caught.value)
    dispatch.runtime_tokens.clear()  # on a GPU the token of a program that has failed fails those behind it
    assert jax.jit(lambda v: works([v], [v]))(x)[0].tolist() == [1, 1, 1]


def test_a_function_that_is_not_there_is_named_and_a_name_is_taken_once(python):
    call = python(copy)
    with pytest.raises(UsageError, match="'copy 0' is registered already"):
        host_callbacks.register("copy 0", copy)
    step = jax.jit(lambda v: call([v], [v]))
    step(jnp.ones(3))
    host_callbacks.forget("copy 0")
    with pytest.raises(jax.errors.JaxRuntimeError, match="unknown Python function of a program 'copy 0'"):
        jax.block_until_ready(step(jnp.ones(3)))
