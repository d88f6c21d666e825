"""A forked worker: `python -m jaxmpi.function.worker SOCKET`, started by `jaxmpi.fork` only."""

import json
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from jaxmpi import runtime
from jaxmpi.function.lines import SocketLine, WorkerDied


def main(master: Connection) -> None:
    """Learn what this process is to be, set it up, call the master back, carry out its orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's to answer
    told: dict[str, Any] = json.loads(master.recv_bytes())
    import jax

    sys.path[:], sys.argv[:] = told["path"], told["argv"]  # a script that it imports may read its arguments
    jax.config.update("jax_enable_x64", told["x64"])
    runtime.keep_freed_memory()
    runtime.pin_cores(told["rank"], told["size"])
    runtime.use_compilation_cache()
    from jaxmpi.function import drive

    line = SocketLine(told["rank"], told["size"], {0: master}, {})
    try:
        drive.serve(drive.forked_team(line, told["fork"]))
    except WorkerDied:
        pass
    except Exception:  # alone, after the reports
        traceback.print_exc()
        leave(1)
    leave(0)


def leave(code: int) -> None:
    """At once: there is nothing to wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
