"""Memory that a worker holds in a step, part by part, before the first one.

Shapes say what params, gradients and the optimizer's state take. An exchange's arrays are as many as were measured of
its strategy. XLA says what it allots for activations: the program of the first step is asked before it runs, which
costs no compilation, for the step runs that program. So a run is checked twice: before a state is made, by what its
shapes need, and before the first step.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxmpi.allreduce.working_memory import at_work
from jaxmpi.comm.topology import Workers
from jaxmpi.config.schema import Experiment
from jaxmpi.core.deals import Leaves
from jaxmpi.core.errors import check
from jaxmpi.core.pytrees import size_bytes
from jaxmpi.rules.base import Rule
from jaxmpi.runtime.allocator import give_back_at_once, keep_freed_memory
from jaxmpi.trainer.build import TrainingPlan, rule_state, state_bytes, why_whole, with_shards

KEPT_FREED = 2  # times what is held at once that there must be to keep freed memory; at most 1.9 was seen
EARLY = "slices of gradients", "activations and a bucket"  # of gradients that are added up when they come


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one worker in a step."""

    params: int
    model_state: int
    moments: int  # of the rule's state, which the optimizer's is
    whole_moments: int  # the same without sharded updates
    sliced_moments: int | None  # and with them; None if updates cannot be sharded, or only a trial shows it
    copies: int  # of other workers' slices, `--exchange.buddy`: those that count, and those to come
    before: int  # of params and state as they were, if the step keeps them until it counts
    gradients: int  # that exist together
    exchange: int  # what an exchange between programs has beside gradients, about
    is_whole: bool  # whether one program is the whole step: its figure has gradients and buckets in it
    process: int = 0  # of the process itself, before it is there
    shares_params: bool = False  # whether the workers of a host have one copy of the params
    is_early: bool = False  # whether gradients leave their program as slices; activations then have a bucket in them
    padding: float = 0.0  # of rows of whole tensors, the share that fills them up
    activations: int | None = None  # what XLA allots to the program beside arguments and results, if it is known

    @property
    def kept(self) -> int:
        """Between steps as well, but for shared params."""
        return self.params - self.shared + self.model_state + self.moments

    @property
    def at_once(self) -> int:
        """The most at one time: activations are gone when gradients are exchanged."""
        activations = self.activations or 0
        lasting = self.process + self.kept + self.copies + self.before
        if self.is_whole:
            return lasting + max(self.gradients, activations)
        return lasting + self.gradients + max(self.exchange, activations)

    def on_host(self, workers: int) -> int:
        """The most at one time of so many workers of a host."""
        return workers * self.at_once + self.shared

    @property
    def shared(self) -> int:
        """Once a host."""
        return self.params * self.shares_params

    def sliced(self) -> "Held":
        """The same with sharded updates."""
        moments = self.moments if self.sliced_moments is None else self.sliced_moments
        saved = self.moments - moments
        return replace(self, moments=moments, before=self.before - saved * bool(self.before))

    def with_share(self, share: float) -> "Held":
        """The same for a share of the local batch: activations are as many as its examples, other buffers stay."""
        activations = self.activations or 0
        fixed = min(activations, 2 * self.gradients) if self.is_whole else 0
        return replace(self, activations=fixed + round(share * (activations - fixed)))


def held(
    experiment: Experiment, workers: Workers, plan: TrainingPlan, rule: Rule, strategy: str, *, is_whole: bool
) -> Held:
    """Memory of each worker, as far as shapes say it.

    Args:
        rule, strategy: of the run.
        is_whole: as of `Held`.
    """
    params, model_state = map(size_bytes, jax.eval_shape(plan.init, jax.random.key(0)))
    shapes = plan.params()
    moments = size_bytes(rule_state(rule, shapes))
    keeps = experiment.on_nonfinite == "skip" or experiment.on_rank_loss == "shrink"
    exchanges = workers.size > 1 and not is_whole
    shares = bool(rule.sharding and rule.sharding.shards.shared_params)
    is_early = bool(rule.sharding and rule.sharding.shards.early)
    arrays = at_work(
        strategy, is_sharded=bool(rule.sharding), shares_params=shares, adds_devices=experiment.devices > 1
    )
    slices = -(-params // workers.size)
    return Held(
        params=params,
        model_state=model_state,
        moments=moments,
        whole_moments=size_bytes(jax.eval_shape(rule.init, shapes)),
        sliced_moments=moments if rule.sharding else sliced_moments(experiment, workers, plan),
        copies=2 * min(experiment.exchange.buddy, workers.size - 1) * moments if rule.sharding else 0,
        before=keeps * (params + model_state + moments),
        gradients=slices if is_early else params,
        exchange=exchanges * (slices if is_early else round(arrays * params)),
        is_whole=is_whole,
        shares_params=shares,
        is_early=is_early,
        padding=padding(rule),
    )


def padding(rule: Rule) -> float:
    """Share of a worker's row that fills it up, if workers update whole tensors."""
    cut = rule.sharding.shards.cut if rule.sharding else None
    return cut.deal.padding if isinstance(cut, Leaves) else 0.0


def sliced_moments(experiment: Experiment, workers: Workers, plan: TrainingPlan) -> int | None:
    """Bytes of the optimizer's state of one worker with sharded updates, if they can be; a user's is not tried out."""
    on = with_shards(experiment, "on")
    if experiment.optim.transform is not None or why_whole(on, plan, workers):
        return None
    return state_bytes(on, plan, workers)


def measured(of: Held, program: jax.stages.Compiled) -> Held:
    """The same with what XLA allots to the program; as it was if XLA does not say."""
    analysis = program.memory_analysis()
    return of if analysis is None else replace(of, activations=analysis.temp_size_in_bytes)


# ---------------------------------------------------------------- in words


def parts(of: Held) -> dict[str, int]:
    """Each part by its name, params and the optimizer's state first.

    Of a step in one program XLA knows gradients, activations and buckets together.
    """
    named = {
        "params": of.params - of.shared,
        "params of the host": of.shared,
        "optimizer's state": of.moments,
        "model state": of.model_state,
    }
    named |= {"copies of slices": of.copies, "state before a step": of.before, "a process": of.process}
    if of.is_whole and of.activations is not None:
        named["gradients, activations and buckets"] = max(of.gradients, of.activations)
    else:
        gradients, activations = EARLY if of.is_early else ("gradients", "activations")
        named |= {gradients: of.gradients, activations: of.activations or 0}
    named["new slices" if of.is_early else "buckets"] = of.exchange
    return {name: size for name, size in named.items() if size or name in ("params", "optimizer's state")}


def words(of: Held, workers: int) -> str:
    """A line for the headline."""
    moments = f"{mb(of.moments)} of the optimizer's state"
    is_sharded = of.moments < of.whole_moments
    if is_sharded:
        moments = f"{mb(of.moments)} of {mb(of.whole_moments)} of the optimizer's state"
    elif of.sliced().moments < of.moments:
        moments += f" ({mb(of.sliced().moments)} with --exchange.shard-update on)"
    others = [
        f"{mb(size)} of {name}" for name, size in parts(of).items() if not name.startswith(("params", "optimizer's"))
    ]
    rows = f", whole tensors in rows that {of.padding:.1%} fill up" if of.padding else ""
    params = f"{mb(of.params)} of params" + " that all workers share" * of.shares_params
    sharded = f"updates sharded over {workers} workers{rows}: " * is_sharded
    return f"{sharded}each worker holds, in MB, {', '.join([params, moments, *others])}"


def words_of_step(of: Held, here: int, free_bytes: int) -> str:
    """A line before the first step.

    Args:
        here: workers of this host.
    """
    named = "gradients, activations and buckets" if of.is_whole else EARLY[1] if of.is_early else "activations"
    known = f"{mb(of.activations)} MB of {named}, " if of.activations is not None else ""
    short = "; freed buffers are given back at once, twice that is not free" if is_short(of, here, free_bytes) else ""
    return (
        f"a step holds {known}{mb(of.at_once)} MB at once: {mb(of.on_host(here))} for {here} "
        f"worker{'s' * (here > 1)} of this host, of {mb(free_bytes)}{short}"
    )


def mb(number: int) -> str:
    """Bytes in MB, in three digits or whole."""
    return f"{number / 1e6:.3g}" if number < 999.5e6 else f"{number / 1e6:,.0f}"


# ---------------------------------------------------------------- whether it fits


def workers_here(workers: Workers) -> int:
    """Workers of all processes of this host."""
    return workers.processes.local_size * len(workers.mine)


def is_short(of: Held, here: int, free_bytes: int) -> bool:
    """Whether memory has no room for holes between freed buffers, on CPUs."""
    return KEPT_FREED * of.on_host(here) > free_bytes and jax.default_backend() == "cpu"


def make_room(of: Held, workers: Workers, plan: TrainingPlan, free_bytes: int) -> None:
    """Have this process keep freed memory or give it back; refuse what this host cannot hold, by its first rank.

    Raises:
        UsageError: bytes needed and free, and what would fit; on CPUs.
    """
    here = workers_here(workers)
    if is_short(of, here, free_bytes):
        give_back_at_once()
    else:
        keep_freed_memory()  # again, if a run of this process before was short
    if workers.processes.local_rank == 0 and jax.default_backend() == "cpu":
        check_fits(of, here, plan.feed.samplers[0].local_batch, free_bytes)


def check_fits(of: Held, here: int, local_batch: int, free_bytes: int) -> None:
    """Raise `UsageError` if so many workers of one host do not fit, with what would."""
    need, each = of.on_host(here), ", ".join(f"{mb(size)} of {name}" for name, size in parts(of).items())
    check(
        need <= free_bytes,
        f"memory: got {here} worker{'s' * (here > 1)} on this host, {mb(of.at_once)} MB each ({each}), {mb(need)} in "
        f"all; expected at most the {mb(free_bytes)} that are free: "
        + (", or ".join(ways(of, here, local_batch, free_bytes)) or "take a smaller model, or a host of more memory"),
    )


def ways(of: Held, here: int, local_batch: int, free_bytes: int) -> list[str]:
    """Options with which it would fit, each with what a worker would hold."""
    found: list[str] = []
    sizes = [size for size in range(local_batch, 0, -1) if local_batch % size == 0]
    kinds: list[tuple[str, Any]] = [("", of)]
    if of.sliced().moments < of.moments:
        kinds.append(("--exchange.shard-update on", of.sliced()))
    for option, base in kinds:
        fitting = [size for size in sizes if base.with_share(size / local_batch).on_host(here) <= free_bytes]
        if fitting:
            batch = f"--micro-batch or --local-batch {fitting[0]}" if fitting[0] < local_batch else ""
            less = mb(base.with_share(fitting[0] / local_batch).at_once)
            found.append(f"{' with '.join(filter(None, (option, batch)))} (about {less} each)")
    fewer = max(0, free_bytes - of.shared) // of.at_once
    return [*found, *([f"{fewer} worker{'s' * (fewer > 1)} on this host"] if fewer else [])]
