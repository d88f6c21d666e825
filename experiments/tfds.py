"""A small GoogLeNet on images of TensorFlow Datasets, or on digits without data.

python -c "import tensorflow_datasets as tfds; tfds.builder('cifar10', data_dir='/data/tfds',
    file_format='array_record').download_and_prepare()"
mpirun -n 8 python -m jaxmpi.train experiments/tfds.py --data.dir /data/tfds --data.name cifar10
mpirun -n 8 python -m jaxmpi.train experiments/tfds.py

Any prepared data set with the features `image` and `label` will do; the model gets as many classes as it has. Training
itself needs no TensorFlow: `pip install 'jaxmpi[tfds]'`. Splits have TFDS's own names, as in --data.train-split
'train[:90%]'.
"""

from jaxmpi.config import Data, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.experiments.digits import experiment as fallback
from jaxmpi.models.googlenet import googlenet_loss, googlenet_tiny

experiment = Experiment(
    model=googlenet_tiny(),
    loss=googlenet_loss,
    data=Data(
        source="tfds",
        name="cifar10",
        validation_split="test",
        resize=36,
        crop=32,
        mirror=True,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    optim=Optim("momentum", lr=0.01, weight_decay=1e-4),
    schedule=Schedule("cosine", warmup="1ep"),
    rule=RuleConfig("awagd"),
    local_batch=16,
    train_for="30ep",
    fallback=fallback,
)
