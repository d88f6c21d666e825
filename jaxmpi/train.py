"""`python -m jaxmpi.train EXPERIMENT.py`: train over all workers of a job."""

import gc

from jaxmpi.runtime import interrupts

if __name__ == "__main__":
    interrupts.leave_on_interrupt()
    gc.disable()  # modules stay: to search them for garbage while they load takes a tenth of the time
    from jaxmpi.trainer.main import main  # takes a second, most of it for JAX

    gc.freeze()
    gc.enable()
    main()
