"""The trainer: builds a run from an experiment and carries it out.

In reading order: `main`, a run from start to end; `compatibility`, options that do not go together; `training_plan`,
the run's numbers; `step_form`, of which programs its step is made; `build`, its functions and state 0;
`resolve_auto`, choices left open; `step`, the training step; `memory` of a worker, in a run and before it; `run`,
parts opened and closed together, and the guard that votes on losses; `callbacks`, what happens around steps; `loop`
and `timetable` for all rules; `lock_step`, workers that step together; `recovery`, the loop again; `asynchronous`,
workers that do not wait, and `shared_evaluation`; `evaluate`; `progress`, lines about all ranks; `resume`, state in
and out; `options` of commands; `finished_runs`, evaluated and asked for predictions; `exported_program`, a model with
its program; `notebook_workers`, a run in processes of its own; `api`, `jaxmpi.Trainer`.

It imports `core`, `runtime`, `model`, `config`, `comm`, `allreduce`, `data`, `checkpoint`, `observe`, `optim`, `tasks`,
`rules`, `data` and `recover`.
"""
