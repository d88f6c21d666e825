"""Models by name. A model never sees rank or communicator; `python -m models` prints the table."""

from collections.abc import Callable

from jaxmpi.model import Model
from models import cnn, googlenet

MODELS: dict[str, Callable[..., Model]] = {
    "googlenet": googlenet.googlenet,
    "googlenet_tiny": googlenet.googlenet_tiny,
    "digits_cnn": cnn.digits_cnn,
    "digits_cnn_tiny": cnn.digits_cnn_tiny,
}
