"""GoogLeNetBN with packed images in memory (IBM), or on digits without data.

jaxmpi data pack /data/imagenet /data/packed --resize 256
jaxmpi train -n 8 dimd/googlenetbn --data.dir /data/packed

The recipe of experiments/googlenetbn.py with DIMD and trees of four colours (Kumar et al. 2018). All workers together
hold one copy of the data; with --data.group-size S each S of them do. One process a host that drives K devices:
--devices K. Not run on ImageNet here.
"""

import dataclasses

from jaxmpi.experiments.dimd.resnet50 import with_dimd
from jaxmpi.experiments.googlenetbn import experiment as paper

assert paper.fallback
experiment = dataclasses.replace(with_dimd(paper, "packed"), fallback=with_dimd(paper.fallback, "digits"))
