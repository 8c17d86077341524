"""Things to test guarded code with: a model server that dies when it is asked for too much.

Nothing here is imported by the guard itself, and nothing here imports the guard.
"""
