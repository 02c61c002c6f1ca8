"""The script was written for an older numpy."""

import numpy
from job import start

start()
weights = numpy.ones(4, dtype=numpy.float)
