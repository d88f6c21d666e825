#!/bin/bash
# Flux: flux batch contrib/flux.sh
#flux: --job-name=googlenet
#flux: --nodes=2
#flux: --time-limit=12h
set -u
source .venv/bin/activate
flux run --nodes 2 --ntasks 16 --cores-per-task 1 -o mpi=none -o pmi=simple,pmix \
  python -m jaxmpi.train experiments/googlenet.py --data.dir /data/imagenet
