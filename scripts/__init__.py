"""The repository's commands, such as venv, test, lint and demo. Not part of the package."""
