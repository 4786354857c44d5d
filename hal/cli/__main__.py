"""``python -m hal.cli``."""

from hal.cli.main import main

main()
