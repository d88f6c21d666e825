"""The trainer: makes a plan from an experiment, a run from the plan, and carries it out.

In reading order: `main`, a run from start to end; `conflicts`, options that do not go together; `plan`, the numbers;
`step_form`, of which programs the step is made, and what is left open; `build`, its functions; `step`, the training
step; `state` in and out; `memory` of a worker; `run`, all that is open while it lasts, and the guard that votes on
steps; `callbacks`; `loop` and `timetable` for all rules; `lock_step`, workers that step together, and the loop again
after failures; `asynchronous`, workers that do not wait, with `shared_evaluation`; `evaluate`; `progress`, lines about
all ranks; `options` of commands; `finished` runs, evaluated and asked for predictions; `exported_program`; `api`,
`jaxmpi.Trainer`.

It imports `core`, `runtime`, `model`, `config`, `comm`, `allreduce`, `data`, `checkpoint`, `observe`, `optim`, `tasks`,
`rules` and `recover`.
"""
