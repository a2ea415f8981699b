"""Rollouts, packed groups and trees, micro-batches."""
