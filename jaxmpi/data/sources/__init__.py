"""Sources of examples: a protocol, a file for each kind, their names.

In reading order: `base`, the protocol, and tables of named columns; `arrays` in memory, digits and animals;
`image_folder`; `packed`, a blob and an index; `open_files`, reads at an offset; `numpy_files` and NumPy's format;
`batch_files` of Theano-MPI; `arrow`, Parquet and Hugging Face; `web_dataset`; `tfds`; `grain_datasets`;
`token_file`; `text` as tokens; `views` of other sources: mixtures, hold-outs; `registry`, a row for each.

It imports `core`, `config` and `data`.
"""
