"""`python -m jaxmpi.train EXPERIMENT.py`: train over all workers of a job."""

import atexit
import gc
import sys

from jaxmpi.runtime import failures, job_folder, process, progress

if __name__ == "__main__":
    job_folder.end_with_supervisor()
    failures.leave_on_interrupt()
    failures.open_streams()
    failures.install_excepthooks()
    if process.my_rank() == 0 and not {"--quiet", "--help", "-h"} & {*sys.argv}:
        progress.start_progress()
    gc.disable()  # modules stay: to search them for garbage while they load takes a tenth of the time
    with progress.phase("importing JAX"):
        from jaxmpi.config.experiment_file import refuse_early, take_run

        sys.argv[1:] = take_run(sys.argv[1:])  # so a run's directory keeps a line that needs no other run
        refuse_early(sys.argv[1:])
        from jaxmpi.trainer.main import main  # takes a second

    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)  # nor for garbage that goes with the process
    main()
