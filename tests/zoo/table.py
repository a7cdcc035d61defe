"""All rows of the zoo."""

from tests.zoo.losses import LOSSES
from tests.zoo.science import SCIENCE
from tests.zoo.sequence import SEQUENCE
from tests.zoo.vision import VISION

ZOO = [*VISION, *SEQUENCE, *SCIENCE, *LOSSES]
NAMED = {str(row): row for row in ZOO}
assert len(NAMED) == len(ZOO)
