"""Output of a run: its record, terminal, trace, plots and report.

In reading order: `step_timing`, `flops`, `recorder`, `sinks`, `terminal`, `trace`, `gradient_noise`, `plots`, `report`.

It imports `core`, `runtime` and `comm`.
"""
