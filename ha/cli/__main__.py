"""`python -m ha.cli`, where the command `ha` is not on the path."""

from ha.cli import main

main()
