#!/bin/bash
# Slurm: sbatch contrib/slurm.sh. It saves itself two minutes before its time is up, and is put back into the queue.
# `srun --mpi=list` must list pmix, and mpi4py's MPI must be one that speaks it.
#SBATCH --job-name=googlenet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@120
set -u
source .venv/bin/activate
run=runs/googlenet
resume=()
if [ -e "$run/record.jsonl" ]; then resume=(--resume); fi
srun --mpi=pmix python -m jaxmpi.train experiments/googlenet.py --data.dir /data/imagenet --run-dir "$run" "${resume[@]}"
code=$?
# Slurm requeues after a failed node, not after an exit code; 75 says that the run has saved itself and wants to go on.
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
