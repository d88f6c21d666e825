"""Sources of examples: a protocol, a file for each kind, their names.

In reading order: `base`, the protocol; `arrays` in memory; `animals`, silhouettes of a package; `image_folder`;
`packed`, a blob and an index; `open_files`, reads at an offset; `npy`, NumPy's format; `batch_files` of Theano-MPI;
`columns` of a table; `numpy_files`; `arrow`, Parquet and Hugging Face; `web_dataset`; `tfds`; `grain_datasets`; `text`
as tokens; `mixture` of sources; `registry`, a row for each.

It imports `core`, `config` and `data`.
"""
