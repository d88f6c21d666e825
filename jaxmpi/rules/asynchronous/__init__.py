"""Asynchronous rules: workers that do not wait for each other.

In reading order: `rules`, the arithmetic of EASGD, ASGD and GoSGD; `transport`, requests over MPI; `center`, which
servers keep; `gossip`, pushes between workers; `start`, params as one vector and checkpoints; `worker`, what a worker
does between its steps; `coordinator`, which rank does what, and who is late. The trainer's loop drives a worker by
`jaxmpi.trainer.asynchronous`.
"""
