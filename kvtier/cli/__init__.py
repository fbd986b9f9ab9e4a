"""The command line. main.py is the entry point; one file a group of commands."""
