#!/bin/bash
# Slurm: sbatch contrib/slurm.sh. It saves itself two minutes before its time is up, and is put back into the queue.
# `srun --mpi=pmix true` must work (Debian's plugin needs libpmix-dev), and mpi4py's MPI must be one that speaks it.
#SBATCH --job-name=googlenet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=2
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
set -u
source .venv/bin/activate
run=runs/googlenet
resume=()
if [ -e "$run/record.jsonl" ]; then resume=(--resume); fi
# --wait: 60 s after a rank has died the others are ended. --kill-on-bad-exit could hide the 75 of ranks that leave together.
srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" --wait=60 \
  python -m jaxmpi.train experiments/googlenet.py --data.dir /data/imagenet --run-dir "$run" "${resume[@]}"
code=$?
# Slurm requeues after a failed node, not after an exit code; 75 says that the run has saved itself and wants to go on.
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
