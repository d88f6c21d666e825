"""Asynchronous rules: workers that do not wait for each other.

In reading order: `rules`, the arithmetic of EASGD, ASGD and GoSGD; `transport`, requests over MPI; `progress`, what
workers report; `center`, which servers keep; `gossip`, pushes between workers; `worker`, how a rank starts, what a
worker does between its steps, and who is late. The trainer's loop drives a worker by `jaxmpi.trainer.asynchronous`.
"""
