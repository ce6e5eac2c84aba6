"""2^x for |x| ≤ 1/2 as a polynomial: sums and products alone, which every device rounds alike."""

import math

# e^(x ln 2) in powers of x, the highest first; what follows is below the rounding of float64.
SERIES = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(13, -1, -1))
SQRT_2 = math.sqrt(2.0)
