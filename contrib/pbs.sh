#!/bin/bash
# PBS Pro and OpenPBS with Open MPI: qsub contrib/pbs.sh. It saves itself ten minutes before its time is up; submitted
# again it goes on. `--elastic 8:16 --restarts 3` in place of -n goes on with the hosts that are left.
#PBS -N googlenet
#PBS -l select=2:ncpus=8:mpiprocs=8
#PBS -l walltime=12:00:00
set -u
cd "$PBS_O_WORKDIR" || exit 1
source .venv/bin/activate
run=runs/googlenet
resume=()
if [ -e "$run/record.jsonl" ]; then resume=(--resume); fi
timeout --preserve-status -s USR1 710m \
  jaxmpi train -n "$(wc -l <"$PBS_NODEFILE")" --launcher-args "--hostfile $PBS_NODEFILE -x PATH" \
  experiments/googlenet.py --data.dir /data/imagenet --run-dir "$run" "${resume[@]}"
