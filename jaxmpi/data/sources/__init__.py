"""Sources of examples: a protocol, a file for each kind, their names.

In reading order: `base`, the protocol, and tables of named columns; `reading`, by threads and at offsets; `arrays` in
memory, digits and animals; `image_folder`; `packed`, a blob and an index; `numpy_files`, NumPy's format and batch files
of Theano-MPI; `arrow`, Parquet and Hugging Face; `web_dataset`; `tfds`; `grain_datasets`; `text` as tokens; `registry`,
a row for each, mixtures and hold-outs.

It imports `core`, `config` and `data`.
"""
