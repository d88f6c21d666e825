"""Spack package of a clone.

Put this folder into a repository of yours as packages/py-jaxmpi, then

    spack dev-build py-jaxmpi@develop ^openmpi    # or ^cray-mpich, ^mpich, ...

mpi4py and mpi4jax are built with that MPI.
"""

from spack.package import *


class PyJaxmpi(PythonPackage):
    """Data-parallel trainer for JAX models wherever MPI runs."""

    license("Apache-2.0 AND MIT")

    version("develop")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling", type="build")
    depends_on("mpi")
    with default_args(type=("build", "run")):
        depends_on("py-jax@0.10.2:")
        depends_on("py-jaxlib@0.10.2:")
        depends_on("py-flax@0.12.8:")
        depends_on("py-optax@0.2.8:")
        depends_on("py-numpy@2:")
        depends_on("py-flatbuffers@25:")
        depends_on("py-rich@15:")
        depends_on("py-pillow@12:")
        depends_on("py-simplejpeg@1.9:")
        depends_on("opencv@4.12: +python3")
        depends_on("py-cloudpickle@3:")
        depends_on("py-mpi4py@4.1.2:")
        depends_on("py-mpi4jax@0.9.1.post2:")
