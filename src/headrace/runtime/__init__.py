"""What rooms share while they run: compiled loops (`compiled`)."""
