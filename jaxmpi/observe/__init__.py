"""Output of a run: its record, terminal, trace, plots and report.

In reading order: `record_format`, `step_timing`, `flops`, `recorder`, `sinks`, `terminal`, `trace`, `gradient_noise`,
`plots`, `record_reader`, `report_charts`, `report`. `page/` holds the files of the report's page.

It imports `core`, `runtime` and `comm`.
"""
