"""Algorithms that sum a bucket over workers, one module for each; `table` has all of them.

A module holds the sum inside a program, its schedule for C if there is one, the cost and the row of `STRATEGIES`.
Inside a program a strategy takes f32[n], n % comm.size == 0. It gives the sum over workers, bitwise equal on all of
them, and adds in f32 whatever the wire. It sees only a Comm, whose rank may be a traced value: no Python branch on
rank. Loops over packets and round a ring are loops of `jax.lax`, so a step at 64 ranks compiles as fast as one at 2.

Between processes on CPUs C changes a rank's vector in place, by a schedule of messages and additions
(`allreduce.schedules`), many parts at once: a link is busy with one while another adds. The bits are the same.
All workers decode an encoded sum, the one that made it included: so all hold the same bits. A place is an index into
`comm.order`, in which ranks of one host are neighbours.
"""

from jaxmpi.allreduce.algorithms.spec import ALL as ALL
from jaxmpi.allreduce.algorithms.spec import StrategySpec as StrategySpec
from jaxmpi.allreduce.algorithms.table import ALIASES as ALIASES
from jaxmpi.allreduce.algorithms.table import STRATEGIES as STRATEGIES
from jaxmpi.allreduce.algorithms.table import Strategy as Strategy
from jaxmpi.allreduce.algorithms.table import exchanges as exchanges
from jaxmpi.allreduce.algorithms.table import find as find
from jaxmpi.allreduce.algorithms.table import in_shared_memory as in_shared_memory
from jaxmpi.allreduce.algorithms.table import parse as parse
