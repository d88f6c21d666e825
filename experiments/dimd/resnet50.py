"""ResNet-50 with packed images in memory (IBM), or on digits without data.

jaxmpi data pack /data/imagenet /data/packed --resize 256
jaxmpi train -n 8 dimd/resnet50 --data.dir /data/packed

The recipe of experiments/resnet50.py with DIMD and trees of four colours (Kumar et al. 2018). All workers together
hold one copy of the data; with --data.group-size S each S of them do. One process a host that drives K devices:
--devices K. Not run on ImageNet here.
"""

import dataclasses

from jaxmpi.config import ExchangeConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.experiments.resnet50 import experiment as paper


def with_dimd(recipe: Experiment, source: str) -> Experiment:
    """A recipe with this source in memory, over four colours."""
    data = dataclasses.replace(recipe.data, source=source, memory="partition")
    return dataclasses.replace(recipe, data=data, exchange=ExchangeConfig("color4"))


assert paper.fallback
experiment = dataclasses.replace(with_dimd(paper, "packed"), fallback=with_dimd(paper.fallback, "digits"))
