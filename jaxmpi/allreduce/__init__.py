"""The exchange: a tree of gradients is fused into buckets, compressed, and summed over workers by an algorithm.

In reading order: `api` (`jaxmpi.exchange`), `buckets`, `wires`, `compression`, `algorithms` with `building_blocks`,
`subgroups`, `host_comm` and `prices`; `sharded` with the optimizer between its halves, and `early_scatter` with the
first half in the backward pass; `overlap` behind the backward pass on `comm_thread`; `cost_model` and `autotune` choose
a strategy; `call_order` compares calls between ranks.

It imports `core`, `runtime`, `config` and `comm`.
"""
