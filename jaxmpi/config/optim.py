"""Settings of the optimizer and its schedule."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from jaxmpi.config.durations import duration_steps
from jaxmpi.config.validate import InPython, check_fields
from jaxmpi.core.errors import UsageError


@dataclass(frozen=True)
class Optim:
    """The optimizer that every worker runs."""

    name: str = "momentum"  # name of the optimizer: docs/rules.md
    lr: float = 0.01  # learning rate, the same on any number of workers
    lr_for_batch: int = 0  # effective batch that lr is for: with B examples it is multiplied by B / this; 0 = with any
    lr_scaling: Literal["linear", "sqrt"] = "linear"  # with lr_for_batch: multiply by B / this, or its square root
    momentum: float | None = None  # mu, in [0, 1), if the optimizer has one; None: its own
    rate_in_velocity: bool = False  # momentum, nesterov: v <- mu v - eta g; else w <- w - eta v
    b1: float | None = None  # decay of the mean of gradients, if the optimizer has one; None: its own
    b2: float | None = None  # decay of the mean of their squares, likewise
    eps: float | None = None  # number added to a denominator, likewise
    weight_decay: float = 0.0  # lambda; added to the gradient, or decoupled: docs/rules.md
    bias_lr_factor: float = 1.0  # tensors of one axis run this times lr; the papers use 2
    decay_bias: bool = True  # apply weight decay to tensors of one axis, too; the papers say no
    clip_norm: float = 0.0  # largest global norm of the gradients a rule steps with; 0 = no clipping
    ema: float = 0.0  # decay of a moving average of params, which is then evaluated and exported; 0 = none
    decay_mask: InPython[Callable[[Any], Any] | None] = None  # params -> tree of bool: tensors that decay
    transform: InPython[Any] = None  # an Optax optimizer, or (schedule) -> one; `name` is then of your own
    # for sharded updates with a `transform`: element if it treats every entry alone, tensor if every tensor
    shard_by: InPython[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(
                f"optim.name: got a {type(self.name).__name__}; expected a name, such as adamw; an optimizer of Optax "
                'has a field of its own: Optim("mine", transform=...)'
            )
        check_fields(
            self,
            "optim.",
            lr="(0, inf)",
            lr_for_batch=">= 0 examples",
            weight_decay=">= 0",
            ema="[0, 1), such as 0.999",
            clip_norm=">= 0",
            bias_lr_factor="> 0",
            momentum="[0, 1)",
            b1="[0, 1)",
            b2="[0, 1)",
            eps="> 0",
        )
        if self.shard_by not in ("", "element", "tensor") or (self.shard_by and self.transform is None):
            raise UsageError(
                f"optim.shard_by: got {self.shard_by!r}; expected element or tensor, beside optim.transform: "
                "optimizers by name know theirs"
            )
        if self.lr_scaling != "linear" and not self.lr_for_batch:
            raise UsageError(
                f"optim.lr_scaling: got {self.lr_scaling!r} without optim.lr_for_batch; give the batch that lr is for"
            )
        if self.decay_mask is not None and not self.decay_bias:
            raise UsageError("got optim.decay_mask and optim.decay_bias False; give one of them")


@dataclass(frozen=True)
class Schedule:
    """The learning rate by step: a warm-up, then a decay."""

    decay: str = "constant"  # how the rate falls after the warm-up
    boundaries: tuple[str, ...] = ()  # step: durations after which lr is multiplied by `factor`
    factor: float = 0.1  # step: multiplier at each boundary
    power: float = 0.5  # poly: lr (1 - t / span)^power; poly_epoch holds it through each epoch
    span: str = "100%"  # poly, cosine: duration over which lr falls to 0
    warmup: str = "0st"  # duration of the warm-up
    warmup_shape: str = "linear"  # how it rises before; geometric rises once an epoch
    warmup_lr: float = 0.0  # lr at the start, whatever lr is scaled to; 0 means warmup_from
    warmup_from: float = 0.0  # share of lr at the start; 0 means 1/steps (linear), 1/workers (geometric)
    rate: InPython[Callable[[Any], Any] | None] = None  # (step) -> lr, such as an Optax schedule, in place of all this

    def __post_init__(self) -> None:
        other_fields = [f.name for f in fields(self) if f.name != "rate" and getattr(self, f.name) != f.default]
        if self.rate is not None and other_fields:
            raise UsageError(f"got schedule.rate and schedule.{', '.join(other_fields)}; give one of them")
        if self.rate is not None and not callable(self.rate):
            raise UsageError(
                f"schedule.rate: got a {type(self.rate).__name__}; expected a function of the step that gives the "
                "rate, such as an Optax schedule; a constant rate is optim.lr"
            )
        for name, texts in (("boundaries", self.boundaries), ("span", [self.span]), ("warmup", [self.warmup])):
            for text in texts:
                duration_steps(text, 1, 1, 1, f"schedule.{name}")
        check_fields(self, "schedule.", factor="> 0", warmup_lr=">= 0", power="> 0", warmup_from="[0, 1], a share")
        if self.warmup_lr and self.warmup_from:
            raise UsageError(
                f"got schedule.warmup_lr {self.warmup_lr} and schedule.warmup_from {self.warmup_from}; give one of them"
            )
