"""Model FLOPs: of products by their definition and by XLA's analysis, whole models by the field's formulas, peaks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxmpi.comm.topology import gather_workers
from jaxmpi.config import Data, Experiment
from jaxmpi.core.pytrees import PyTree
from jaxmpi.model import Model
from jaxmpi.models.gpt import gpt_tiny
from jaxmpi.observe.flops import (
    BESIDE_LOAD,
    TERAFLOPS,
    Peak,
    StepFlops,
    count_flops,
    device_peak,
    measured_peak,
    peak_on_devices,
    total_cores,
    total_peak,
)
from jaxmpi.runtime.process import my_gpu
from jaxmpi.tasks.registry import make_task
from jaxmpi.trainer import step

W, X = jnp.zeros((8, 8)), jnp.zeros((3, 8))
PRODUCT = 2 * 3 * 8 * 8  # FLOPs of X @ W


def counted(function, *args: PyTree) -> float | None:
    return count_flops(jax.make_jaxpr(function)(*args).jaxpr)


def by_xla(function, *args: PyTree) -> float:
    analysis = jax.jit(function).lower(*args).cost_analysis()
    assert analysis is not None
    return analysis["flops"]


def gradient_flops(model: Model, batch: int, micro_batch: int = 0, label: tuple[int, ...] = ()) -> float | None:
    """The FLOPs of a worker's gradients, as the trainer traces them."""
    forward = step.Forward(make_task(Experiment(model=model, data=Data())))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *model.input_shape), model.input_dtype))
    examples = {
        "image": jnp.zeros((batch, *model.input_shape), model.input_dtype),
        "label": jnp.zeros((batch, *label), jnp.int32),
        "weight": jnp.ones(batch),
    }
    key, number = jax.random.key_data(jax.random.key(0)), jnp.zeros((), jnp.int32)
    flops = StepFlops()
    flops.count(jax.make_jaxpr(step.local_gradients(forward, micro_batch))(*shapes, examples, key, number).jaxpr)
    return flops.per_worker


def dense(widths: tuple[int, ...]) -> Model:
    """Dense layers without biases."""

    def init(key, image):
        return [jnp.zeros(pair) for pair in itertools.pairwise(widths)], {}

    def apply(params, state, x, key, train):
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return x @ params[-1], state

    return Model("dense", init, apply, (widths[0],), widths[-1])


# ---------------------------------------------------------------- programs


@pytest.mark.parametrize(("stride", "padding"), [(1, "SAME"), (2, "VALID"), (3, ((2, 1), (0, 3)))])
def test_a_convolution_and_its_gradients_are_counted_as_xla_does(stride, padding):
    """In the backward pass windows are dilated, inputs have zeros between them, groups are of the batch."""
    for dilation, groups, size in itertools.product((1, 2), (1, 2), (1, 4)):
        x, w = jnp.zeros((4, 13, 11, 4)), jnp.zeros((size, size, 4 // groups, 6))

        def forward(x, w, dilation=dilation, groups=groups):
            layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "rhs_dilation": (dilation, dilation)}
            return jax.lax.conv_general_dilated(x, w, (stride, stride), padding, feature_group_count=groups, **layout)

        y = jnp.zeros(jax.eval_shape(forward, x, w).shape)

        def backward(x, w, y, forward=forward):
            return jax.vjp(forward, x, w)[1](y)

        assert counted(forward, x, w) == by_xla(forward, x, w) > 0
        assert counted(backward, x, w, y) == by_xla(backward, x, w, y)


def test_all_turns_of_a_loop_count_where_xla_counts_one_and_what_a_checkpoint_computes_anew_counts_once():
    ws = jnp.zeros((5, 8, 8))

    def by_scan(ws, x, layer=lambda x, w: x @ w):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    assert counted(by_scan, ws, X) == 5 * PRODUCT
    assert by_xla(by_scan, ws, X) < 2 * PRODUCT
    layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    plain, anew = (
        lambda ws, x, f=f: jax.grad(lambda ws: by_scan(ws, x, f).sum())(ws) for f in (layer, jax.checkpoint(layer))
    )
    assert counted(anew, ws, X) == counted(plain, ws, X)
    assert by_xla(anew, ws, X) > by_xla(plain, ws, X)


def test_of_branches_the_dearest_counts_what_is_not_used_does_not_and_what_cannot_be_counted_is_unknown():
    def branching(w, x):
        x @ w  # pyright: ignore[reportUnusedExpression]
        return jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)

    assert counted(branching, W, X) == PRODUCT
    assert counted(lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, x), X) == 0
    assert counted(lambda w, x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ w, x), W, X) is None
    call = jax.ffi.ffi_call("a_library", jax.ShapeDtypeStruct((3, 8), jnp.float32))
    for opaque in (call, lambda x: jax.pure_callback(np.asarray, x, x), lambda x: io_callback(np.asarray, x, x)):
        assert counted(lambda w, x, opaque=opaque: opaque(x) @ w, W, X) is None


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_dense_layers_take_6_n_an_example_but_for_the_gradient_of_the_input(micro_batch):
    """2 n forward, 2 n for the kernels' gradients, 2 n for those of inputs, which the first layer's has not."""
    widths = (24, 32, 16, 10)
    products = [a * b for a, b in itertools.pairwise(widths)]
    assert gradient_flops(dense(widths), 8, micro_batch) == 8 * (6 * sum(products) - 2 * products[0])


def test_a_gpt_takes_6_n_a_token_and_12_layers_times_width_times_window():
    """N of the kernels alone, without embeddings, norms and biases."""
    model = gpt_tiny()
    params, _ = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    sizes = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    kernels = sum(
        x.size for name, x in sizes.items() if x.ndim == 2 and "embedding" not in name and "places" not in name
    )
    layers, width, window, batch = 2, 48, 16, 4
    attention = 12 * layers * width * window
    assert gradient_flops(model, batch, label=(window,)) == batch * window * (6 * kernels + attention)


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12),
        ("Tesla V100-SXM2-16GB", None, 15.7e12),
        ("TPU v5 lite", 197e12, 197e12),
        ("NVIDIA RTX A4000", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
    ],
)
def test_a_peak_is_known_by_kind_and_dtype_or_not_at_all(kind, bfloat16, float32):
    for dtype, expected in (("bfloat16", bfloat16), ("float32", float32)):
        peak = device_peak(kind, dtype)
        assert (peak and peak.flops_per_s) == (expected and pytest.approx(expected))


def test_the_peak_of_all_is_the_sum_over_workers_devices_or_unknown(monkeypatch):
    """Devices of this machine in the place of those that the table knows."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    one, two = gather_workers(1), gather_workers(2)
    assert total_peak(one, "float32") is None
    monkeypatch.setitem(TERAFLOPS, "cpu", (1.0, 0.5))
    peaks = [total_peak(workers, "float32") for workers in (one, two)]
    assert peaks == [Peak(n * 0.5e12, "data sheet") for n in (1, 2)]


def test_a_peak_of_cores_is_kept_unless_times_vary_as_beside_other_work(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peaks = []
    for times_s in ([0.02, 0.04, 0.04], [0.04] * 3, [0.02] * 3):
        ticks = itertools.chain.from_iterable((0.0, seconds) for seconds in times_s)
        monkeypatch.setattr("jaxmpi.observe.flops.time.perf_counter", ticks.__next__)
        peaks.append(measured_peak.__wrapped__("float32"))
    beside_load, measured, kept = peaks
    assert [peak.source for peak in peaks] == [BESIDE_LOAD, "measured", "measured"]
    assert kept.flops_per_s == measured.flops_per_s == beside_load.flops_per_s / 2


def test_a_gpu_that_ranks_share_counts_once(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    devices = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for rank in range(4):
        for name, value in {"WORLD_RANK": rank, "WORLD_LOCAL_RANK": rank, "WORLD_LOCAL_SIZE": 4}.items():
            monkeypatch.setenv(f"OMPI_COMM_{name}", str(value))
        devices.append([("node0", my_gpu(), 0, "NVIDIA A30")])
    a30 = 82.0e12
    assert peak_on_devices(devices, "float32") == Peak(2 * a30, "data sheet")
    others = [[("node1", gpu, 0, kind)] for [(_, gpu, _, kind)] in devices]
    assert peak_on_devices([*devices, *others], "float32") == Peak(4 * a30, "data sheet")
    whole_host = [("node0", "rank 0", i, "NVIDIA A30") for i in range(4)]  # of one process
    assert peak_on_devices([whole_host], "float32") == Peak(4 * a30, "data sheet")
    assert peak_on_devices([*devices, [("node1", "0", 0, "unheard of")]], "float32") is None


def test_cores_that_ranks_share_count_once_and_a_quota_counts():
    assert total_cores([("a", [0], 1), ("a", [1], 1), ("b", [0, 1, 2, 3], 4)]) == 6
    assert total_cores([("a", [0], 1), ("a", [0], 1), ("a", [1], 1)]) == 2  # three on two cores
    assert total_cores([("a", [*range(64)], 2)]) == 2  # a container's quota
    assert total_cores([("a", [], 8)]) == 8  # a system that tells no cores
