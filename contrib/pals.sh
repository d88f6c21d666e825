#!/bin/bash
# PBS with HPE's PALS, as on Cray EX: qsub contrib/pals.sh. mpi4py must be built with Cray's MPI (contrib/spack, or pip with
# MPICC=cc), since PALS starts no other.
#PBS -N googlenet
#PBS -l select=2:ncpus=64
#PBS -l walltime=06:00:00
set -u
cd "$PBS_O_WORKDIR" || exit 1
source .venv/bin/activate
mpiexec -n 16 --ppn 8 --cpu-bind depth --depth 8 \
  python -m jaxmpi.train experiments/googlenet.py --data.dir /data/imagenet
