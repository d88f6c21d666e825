"""The exchange: gradients in buckets, compressed, summed over workers by an algorithm.

In reading order: `api`, `jaxmpi.exchange`; `buckets` of leaves; `wires`, encodings for sending; `compression`, which
sends less and keeps the rest; `algorithms`, with `building_blocks`; `schedules`, their steps between processes, and
`host_engine`, in which C carries these out; `derivative` of an exchange; `call_order`, compared between ranks;
`dispatch`, buckets at once or one after another; `comm_thread`, which sums while programs compute; `overlap` with the
backward pass; `zero`, an exchange in two halves; `sharded`, the optimizer between the halves; `early_scatter`, the
first half in the backward pass; `local_devices`, several devices a process; `cost_model`, `measuring` of hosts and
`autotune`, choice of a strategy.

It imports `core`, `runtime`, `config` and `comm`.
"""
