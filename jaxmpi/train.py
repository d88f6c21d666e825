"""`python -m jaxmpi.train EXPERIMENT.py`: train over all workers of a job."""

from jaxmpi.runtime import interrupts

if __name__ == "__main__":
    interrupts.leave_on_interrupt()
    from jaxmpi.trainer.main import main  # takes a second, most of it for JAX

    main()
