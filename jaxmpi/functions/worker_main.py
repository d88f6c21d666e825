"""A forked worker: `python -m jaxmpi.functions.worker_main SOCKET`, started by `jaxmpi.fork` only."""

import json
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import jax

from jaxmpi.functions import lifecycle
from jaxmpi.functions.transport import SocketTransport, WorkerDied
from jaxmpi.runtime import affinity, allocator, caches


def main(master: Connection) -> None:
    """Receive this process's setup, then carry out the master's commands."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's to answer
    told: dict[str, Any] = json.loads(master.recv_bytes())
    sys.path[:], sys.argv[:] = told["path"], told["argv"]  # a script that it imports may read its arguments
    jax.config.update("jax_enable_x64", told["x64"])
    allocator.keep_freed_memory()
    affinity.pin_cores(told["rank"], told["size"])
    caches.use_compilation_cache()
    line = SocketTransport(told["rank"], told["size"], {0: master}, {})
    try:
        lifecycle.serve(lifecycle.forked_group(line, told["fork"]))
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
