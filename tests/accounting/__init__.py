"""Accounting: noise shares, planned runs, hyperparameter searches, and noise schedules."""
