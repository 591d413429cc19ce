"""The repository's commands: venv, test, lint, demo. Not part of the package."""
