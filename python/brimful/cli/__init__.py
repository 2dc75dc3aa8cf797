"""What `python -m brimful` runs: each module has main(arguments), which returns the exit status."""
