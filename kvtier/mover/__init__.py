"""Runs the jobs that the store decided: jobs in, bytes moved, completions back."""
