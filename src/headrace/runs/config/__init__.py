"""The config of a run: schema, where each value came from, messages with file and line."""
