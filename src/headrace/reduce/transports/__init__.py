"""Transports between the coordinator of a Gram reduction and its workers: processes, gloo, Ray, a shared folder."""
