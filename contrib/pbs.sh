#!/bin/bash
# PBS Pro and OpenPBS with Open MPI: qsub contrib/pbs.sh
#PBS -N googlenet
#PBS -l select=2:ncpus=8:mpiprocs=8
#PBS -l walltime=12:00:00
set -u
cd "$PBS_O_WORKDIR" || exit 1
source .venv/bin/activate
workers=$(wc -l <"$PBS_NODEFILE")
mpirun -n "$workers" --hostfile "$PBS_NODEFILE" -x PATH \
  python -m jaxmpi.train experiments/googlenet.py --data.dir /data/imagenet
