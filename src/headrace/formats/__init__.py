"""File formats and object stores, opened and checked once for all rooms.

    byte_file      bytes at any offset of a file that may vanish during the read      object_store (s3, gs, az, http),
                                                                                       compressed (gz, zst)
    rows           rows [a, b) of named columns: open_rows(file).read(a, b, columns)   parquet, arrow, numpy_arrays (npy, npz),
                                                                                       safetensors, json_rows
    chunks         what a format of text must know how to do                           lines (txt, jsonl); sources has the others

What a file claims about itself is compared with its size and with caps before memory is taken for it.
"""
