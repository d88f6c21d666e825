"""`jaxmpi bench`: time an exchange beside other libraries and the lower bound.

In reading order: `__main__`, the command; `options`, its command line; `plan`, what is timed; `rounds` of a job;
`contenders`, each an exchange; `baselines`, those of other libraries; `results`, figures.

It imports `core`, `runtime`, `config`, `comm`, `allreduce`, `observe` and `launch`.
"""
