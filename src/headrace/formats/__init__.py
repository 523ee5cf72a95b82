"""File formats and object stores, for all rooms.

    byte_file      bytes at any offset of a file that may vanish during the read      object_store (s3, gs, az, http),
                                                                                       compressed (gz, zst)
    rows           rows [a, b) of named columns: open_rows(file).read(a, b, columns)   parquet, arrow, numpy_arrays (npy, npz),
                                                                                       safetensors, json_rows
    hub_cache      folders of datasets and tokenizers in the cache of the Hugging Face hub
    chunks         the protocol of text formats                                        lines, text_files; sources has the others

The claims of a file about itself are compared with its size and with caps before memory is taken.
"""
