"""Python runs this at the start of each process that a test starts: garbage is searched for less often.

Half of a test job's time is the import of JAX. A fifth of that would go to searches for garbage among modules, which
stay. As much would go to the last search at exit. `jaxmpi.train` has the same for its users.
"""

import atexit
import gc

gc.set_threshold(20_000, 10, 10)
atexit.register(gc.freeze)
