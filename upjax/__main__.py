"""`python -m upjax` is the `upjax` command."""

from upjax.cli import main

main()
