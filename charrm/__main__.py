"""`python -m charrm` is the `charrm` command."""

from charrm.cli import main

main()
