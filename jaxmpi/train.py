"""`python -m jaxmpi.train EXPERIMENT.py`: train over all workers of a job."""

import gc
import sys

from jaxmpi.runtime import failures, interrupts

if __name__ == "__main__":
    interrupts.leave_on_interrupt()
    failures.open_streams()
    failures.install_excepthooks()
    gc.disable()  # modules stay: to search them for garbage while they load takes a tenth of the time
    from jaxmpi.config.experiment_file import refuse_unknown

    refuse_unknown(sys.argv[1:])
    from jaxmpi.trainer.main import main  # takes a second, most of it for JAX

    gc.freeze()
    gc.enable()
    main()
