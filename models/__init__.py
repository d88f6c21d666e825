"""Models by name, without rank or communicator; `jaxmpi models` prints the table."""

from collections.abc import Callable

from jaxmpi.model import Model
from jaxmpi.models import alexnet, cnn, googlenet, googlenetbn, gpt, lstm, resnet, vgg

MODELS: dict[str, Callable[..., Model]] = {
    "alexnet": alexnet.alexnet,
    "alexnet_tiny": alexnet.alexnet_tiny,
    "vgg16": vgg.vgg16,
    "vgg16_tiny": vgg.vgg16_tiny,
    "vgg19": vgg.vgg19,
    "vgg19_tiny": vgg.vgg19_tiny,
    "googlenet": googlenet.googlenet,
    "googlenet_tiny": googlenet.googlenet_tiny,
    "googlenetbn": googlenetbn.googlenetbn,
    "googlenetbn_tiny": googlenetbn.googlenetbn_tiny,
    "resnet18": resnet.resnet18,
    "resnet18_tiny": resnet.resnet18_tiny,
    "resnet50": resnet.resnet50,
    "resnet50_tiny": resnet.resnet50_tiny,
    "resnet101": resnet.resnet101,
    "resnet101_tiny": resnet.resnet101_tiny,
    "resnet152": resnet.resnet152,
    "resnet152_tiny": resnet.resnet152_tiny,
    "digits_cnn": cnn.digits_cnn,
    "digits_cnn_tiny": cnn.digits_cnn_tiny,
    "lstm": lstm.lstm,
    "lstm_tiny": lstm.lstm_tiny,
    "gpt": gpt.gpt,
    "gpt_tiny": gpt.gpt_tiny,
    "lm300m": lstm.lm300m,
    "lm300m_tiny": lstm.lm300m_tiny,
}
