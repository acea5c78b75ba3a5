"""Each run of rows times its own matrix: the work of a mixture's experts."""

from pallas_kernels.grouped_matmul.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.grouped_matmul.api import Implementation as Implementation
from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
