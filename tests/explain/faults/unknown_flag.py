"""The command line has a flag that the script does not know."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.parse_args(["--lr", "0.3", "--batchsize", "8"])
