"""Rollouts, packed groups, trees and micro-batches."""
