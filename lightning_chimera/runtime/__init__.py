"""Runs the stages of one rank: who is where, messages, schedules, gradients, data."""
