"""Fakes, builders and small models for tests; nothing outside tests and benchmarks imports it."""
