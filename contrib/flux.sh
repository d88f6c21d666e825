#!/bin/bash
# Flux: flux batch contrib/flux.sh. It saves itself ten minutes before its time is up; submitted again it goes on.
#flux: --job-name=googlenet
#flux: --nodes=2
#flux: --time-limit=12h
set -u
source .venv/bin/activate
run=runs/googlenet
resume=()
if [ -e "$run/record.jsonl" ]; then resume=(--resume); fi
flux run --nodes 2 --ntasks 16 --cores-per-task 1 -o mpi=none -o pmi=simple,pmix --time-limit=715m --signal=USR1@5m \
  python -m jaxmpi.train experiments/googlenet.py --data.dir /data/imagenet --run-dir "$run" "${resume[@]}"
