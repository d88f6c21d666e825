"""The trainer: makes a plan from an experiment, a run from the plan, and carries it out.

In reading order: `main`, a run from start to end; `conflicts`, options that do not go together; `plan`, the numbers;
`build`, the functions of the step, and what is left open before; `step`, the training step; `state` in and out;
`memory` of a worker; `run`, all that is open while it lasts, with votes, progress lines and evaluations; `callbacks`;
`loop` and `timetable` for all rules; `lock_step`, workers that step together, and the loop again after failures;
`asynchronous`, workers that do not wait; `options` of commands; `finished` runs, evaluated, asked for predictions and
exported; `api`, `jaxmpi.Trainer`.

It imports `core`, `runtime`, `model`, `config`, `comm`, `allreduce`, `data`, `checkpoint`, `observe`, `optim`, `tasks`,
`rules` and `recover`.
"""
