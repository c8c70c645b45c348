"""`python -m flexmarl.cli`, the same as the command `flexmarl`."""

from flexmarl.cli import main

main()
