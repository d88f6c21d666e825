"""Output of a run: its record, terminal, trace and report.

In reading order: `record_format`, words of the record; `step_timing`, parts of a step's time; `flops` of a step;
`gradient_noise`, how far the batch can grow; `sinks`, where lines of the record go too; `terminal`; `recorder`, the
record; `trace`, a timeline of all ranks; `record_reader`; `report_data`, what a report
shows; `report_page`, made of the files in `page/`; `report`, the command.

It imports `core`, `runtime` and `comm`.
"""
