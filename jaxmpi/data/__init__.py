"""Data: sources of examples, their order, and batches made ahead.

In reading order: `sources`; `sampler`, which examples a worker reads at a step; `decode`, images to pixels; `example`,
an example's way into a row of a batch; `loader_worker`, a loader, and memory that it shares with its worker;
`loader_pool`, the loaders of a worker; `batch_loader`, batches in exact order; `packing` of a source into few files;
`tokens` and words of a text in files; `memory_source`, records in memory; `command`, `jaxmpi data`.

Then what no loader process imports, since it imports JAX or MPI: `feed`, batches for the devices; `shuffle` of data
in memory between workers; `in_memory`, the same for a loop of one's own; `mpi_loaders`, started by MPI.

It imports `core`, `config`, `comm`, `runtime`, `model` and `tasks`.
"""

from jaxmpi.config.data import data_dir as data_dir
from jaxmpi.data.batch_loader import Batch as Batch
from jaxmpi.data.batch_loader import Loader as Loader
from jaxmpi.data.decode import CorruptExample as CorruptExample
from jaxmpi.data.example import Augment as Augment
from jaxmpi.data.example import load_mean_image as load_mean_image
from jaxmpi.data.loader_pool import LoaderPool as LoaderPool
from jaxmpi.data.sampler import FileSampler as FileSampler
from jaxmpi.data.sampler import Sampler as Sampler
from jaxmpi.data.sampler import Share as Share
from jaxmpi.data.sources.arrays import ArraySource as ArraySource
from jaxmpi.data.sources.base import Source as Source
from jaxmpi.data.sources.numpy_files import BatchFileSource as BatchFileSource
from jaxmpi.data.sources.numpy_files import write_batch_files as write_batch_files
from jaxmpi.data.sources.registry import SOURCES as SOURCES
from jaxmpi.data.sources.registry import open_source as open_source
from jaxmpi.data.tokens import write_tokens as write_tokens
from jaxmpi.data.tokens import write_words as write_words
