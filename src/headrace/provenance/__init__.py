"""Which documents a step saw: the record of a run, its replay, and the difference of two runs."""
