"""Floating-point operations of a step, and the peak of its devices.

Counted are matrix products and convolutions, 2 for a multiplication with its addition, as the field counts model FLOPs:
all else takes few. They are counted in the program that is traced for the step, so it costs no compilation. XLA's
own analysis counts the same products (tests/observe/test_flops.py), but the body of a loop once, however often it runs:
slices of a batch, layers in `lax.scan`. It also counts what `jax.checkpoint` computes anew.
"""

import functools
import re
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmpi.comm.topology import Workers
from jaxmpi.runtime import compile_cache
from jaxmpi.runtime.process import core_mask, cores, my_gpu

Jaxpr = jax.extend.core.Jaxpr
Shape = tuple[int, ...]
Device = tuple[str, str, int, str]  # host; the variable that names the rank's GPU, or the rank; index; kind
# How names of primitives begin that may hold products which their parameters do not show.
OPAQUE = (
    *("cudnn_fusion", "dot_product_attention", "ffi_call", "io_callback", "pallas_call", "pure_callback", "ragged_dot"),
    *("scaled_matmul", "triton_kernel_call"),
)
ANEW = "rematted_computation"  # in the names of operations that `jax.checkpoint` does a second time

# ---------------------------------------------------------------- of a program


class Uncounted(Exception):
    """A program whose operations cannot be counted."""


def count_flops(jaxpr: Jaxpr) -> float | None:
    """Model FLOPs on one device; None if a part cannot be counted."""
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # XLA leaves the rest out, too
    try:
        return sum(map(equation_flops, used.eqns))
    except Uncounted:
        return None


def equation_flops(equation: Any) -> float:
    """Model FLOPs of an equation: all iterations of loops, the costliest branch.

    Raises:
        Uncounted: a call into another library, or a loop with products that runs as long as its data say.
    """
    name, params = equation.primitive.name, equation.params
    if ANEW in str(equation.source_info.name_stack):
        return 0.0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = np.prod([equation.invars[0].aval.shape[i] for i in contracted])
        return 2.0 * equation.outvars[0].aval.size * float(depth)
    if name == "conv_general_dilated":
        image, kernel, out = (var.aval.shape for var in (*equation.invars, *equation.outvars))
        return convolution_flops(image, kernel, out, params)
    if name.startswith(OPAQUE):
        raise Uncounted
    inner = [sum(map(equation_flops, body.eqns)) for body in jax.extend.core.jaxprs_in_params(params)]
    if name == "while" and any(inner):
        raise Uncounted
    if name == "cond":
        return max(inner)
    return sum(inner) * params.get("length", 1) if name == "scan" else sum(inner)


def convolution_flops(image: Shape, kernel: Shape, out: Shape, params: dict[str, Any]) -> float:
    """XLA's FLOPs of a convolution: none for zeros of padding or dilation."""
    layout = params["dimension_numbers"]
    pairs = 1.0
    for i, (stride, (low, _), spread, dilation) in enumerate(
        zip(params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True)
    ):
        places = np.arange(out[layout.out_spec[2 + i]])[:, None] * stride - low
        places = places + np.arange(kernel[layout.rhs_spec[2 + i]]) * dilation
        inputs = image[layout.lhs_spec[2 + i]]
        pairs *= ((places >= 0) & (places <= (inputs - 1) * spread) & (places % spread == 0)).sum()
    batch, features = (out[axis] for axis in layout.out_spec[:2])
    return 2.0 * batch * features * kernel[layout.rhs_spec[1]] * float(pairs)


class StepFlops:
    """Model FLOPs of one worker's gradients, counted when they are traced."""

    def __init__(self) -> None:
        """Nothing has been traced."""
        self.per_worker: float | None = None  # in one step

    def count(self, jaxpr: Jaxpr) -> None:
        """Take the program of a worker's gradients."""
        self.per_worker = count_flops(jaxpr)


# ---------------------------------------------------------------- of devices


class Peak(NamedTuple):
    """The most FLOP/s of one device or of all."""

    flops_per_s: float
    source: str  # of PEAK_MARKS


BESIDE_LOAD = "measured beside other work"
# Marks of a share of a peak, by its source: beside other work the peak is too low, and so the share too high.
PEAK_MARKS = {"data sheet": "", "measured": "~", BESIDE_LOAD: "<"}

# Dense TFLOP/s of a device as JAX counts them, from the makers' data sheets: bfloat16, float32. By JAX's default a GPU
# since Ampere multiplies float32 as TF32, and a TPU as bfloat16. The first name that `device_kind` has as words counts.
TERAFLOPS: dict[str, tuple[float | None, float | None]] = {
    "GB200": (2500.0, 1250.0),
    "B200": (2250.0, 1125.0),
    "GH200": (989.4, 494.7),
    "H200 NVL": (835.5, 417.8),
    "H200": (989.4, 494.7),
    "H100 NVL": (835.5, 417.8),
    "H100 PCIe": (756.0, 378.0),
    "H100": (989.4, 494.7),
    "A100": (312.0, 156.0),
    "A40": (149.7, 74.8),
    "A30": (165.0, 82.0),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 62.5),
    "L40S": (362.05, 183.0),
    "L40": (181.05, 90.5),
    "L4": (121.0, 60.0),
    "RTX 6000 Ada": (364.2, 182.1),
    "RTX A6000": (154.8, 77.4),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "V100-SXM2": (None, 15.7),
    "V100-PCIE": (None, 14.0),
    "P100-SXM2": (None, 10.6),
    "P100-PCIE": (None, 9.3),
    "Tesla T4": (None, 8.1),
    "TPU v6": (918.0, 918.0),
    "TPU v5 lite": (197.0, 197.0),
    "TPU v5e": (197.0, 197.0),
    "TPU v5p": (459.0, 459.0),
    "TPU v5": (459.0, 459.0),
    "TPU v4": (275.0, 275.0),
    "TPU v3": (61.5, 61.5),
    "TPU v2": (22.5, 22.5),
}
OTHER_KIND = r"(?! (?:Ti|D|SUPER|Laptop|Max-Q)\b)"  # behind a name: a card with another chip
MEASURE_S = 0.05
VARIES = 1.2  # median over least time of a product, above which other processes compute, too


def device_peak(device_kind: str, dtype: str) -> Peak | None:
    """Peak of a device by kind and compute dtype; None if unknown."""
    if "MIG" in device_kind.split():  # a slice of a GPU
        return None
    names = (name for name in TERAFLOPS if re.search(rf"\b{re.escape(name)}\b{OTHER_KIND}", device_kind))
    bfloat16, float32 = TERAFLOPS.get(next(names, ""), (None, None))
    peak = float32 if dtype == "float32" else bfloat16
    return Peak(1e12 * peak, "data sheet") if peak else None


@functools.cache
def measured_peak(dtype: str) -> Peak:
    """Peak of this process's cores, measured once a machine by matrix products for MEASURE_S seconds."""
    models = re.findall("^model name.*", Path("/proc/cpuinfo").read_text(), re.M)
    key = {"processor": [*models, socket.gethostname()][0], "cores": cores(), "dtype": dtype, "jax": jax.__version__}
    if flops_per_s := compile_cache.read_json("peaks", key, lambda value: float(value["flops_per_s"])):
        return Peak(flops_per_s, "measured")
    n = 512 * max(1, round(cores() ** 0.5))
    square = jnp.ones((n, n), dtype)
    product = jax.jit(jnp.matmul).lower(square, square).compile()
    times_s: list[float] = []
    while len(times_s) < 3 or sum(times_s) < MEASURE_S:
        begin_s = time.perf_counter()
        product(square, square).block_until_ready()
        times_s.append(time.perf_counter() - begin_s)
    flops_per_s = 2.0 * n**3 / min(times_s)
    if statistics.median(times_s) > VARIES * min(times_s):
        return Peak(flops_per_s, BESIDE_LOAD)
    compile_cache.write_json("peaks", key, {"flops_per_s": flops_per_s})
    return Peak(flops_per_s, "measured")


def total_peak(workers: Workers, dtype: str) -> Peak | None:
    """Peak of all workers' devices together; on CPUs rank 0 measures it.

    On CPUs the peak of rank 0's cores is scaled to the cores of all hosts that ranks may use. On CPUs other ranks get
    None.
    Communicates: devices, or cores, once.
    """
    control = workers.processes
    if jax.default_backend() == "cpu":
        peak = measured_peak(dtype) if control.rank == 0 else None  # while the others wait: ranks may share cores
        all_cores = total_cores(control.allgather_object([socket.gethostname(), core_mask(), cores()]))
        return peak and peak._replace(flops_per_s=peak.flops_per_s * all_cores / cores())
    devices = workers.mesh.local_devices if workers.mesh is not None else jax.local_devices()[:1]
    place = socket.gethostname(), my_gpu() or f"rank {control.rank}"
    local = [(*place, i, device.device_kind) for i, device in enumerate(devices if control.rank < workers.size else [])]
    return peak_on_devices(control.allgather_object(local), dtype)


def peak_on_devices(ranks: Sequence[Sequence[Device]], dtype: str) -> Peak | None:
    """Peak of all ranks' distinct devices together; None if one is unknown."""
    # Lists by now: JSON has no tuples.
    devices = {(host, gpu, i, kind) for local in ranks for host, gpu, i, kind in local}
    peaks = [device_peak(kind, dtype) for _, _, _, kind in devices]
    rates = [peak.flops_per_s for peak in peaks if peak]
    return Peak(sum(rates), "data sheet") if len(rates) == len(peaks) else None


def total_cores(ranks: Sequence[tuple[str, Sequence[int], int]]) -> int:
    """Number of cores that ranks may use on all hosts, each once."""
    hosts: dict[str, tuple[set[int], int]] = {}
    for host, mask, count in ranks:
        masks, counts = hosts.get(host, (set(), 0))
        hosts[host] = masks | {*mask}, counts + count
    return sum(min(len(masks) or counts, counts) for masks, counts in hosts.values())


class Work(NamedTuple):
    """A step's model FLOPs and what they are compared with."""

    flops_per_step: float  # model FLOPs of all workers
    examples: int  # number in a whole step
    peak: Peak | None  # sum over all workers' devices

    def fields(self, examples_per_s: float) -> dict[str, float]:
        """Fields of the record at this speed; short steps count by examples."""
        flops_per_s = self.flops_per_step * examples_per_s / self.examples
        share = {"mfu": flops_per_s / self.peak.flops_per_s} if self.peak else {}
        return {"flops_per_step": self.flops_per_step, "model_flops_per_s": flops_per_s, **share}
