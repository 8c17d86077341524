"""The command line of the guard."""
