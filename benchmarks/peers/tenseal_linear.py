"""A peer of benchmarks.encrypted: products with weights and sums of a linear layer by TenSEAL.

    python tenseal_linear.py FEATURES OUTPUTS DEGREE SCALE_BITS BITS...

Runs in an environment of its own with tenseal==0.3.18. BITS are those of the primes, the special one last. Prints the
seconds of OUTPUTS outputs; encoding and encryption are not counted.
"""

import random
import sys
import time

import tenseal

features, outputs, degree, scale_bits, *bits = map(int, sys.argv[1:])
context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, degree, coeff_mod_bit_sizes=bits)
context.global_scale = 2.0**scale_bits
context.auto_rescale = False
slots = degree // 2
inputs = [tenseal.ckks_vector(context, [random.uniform(-1, 1) for _ in range(slots)]) for _ in range(features)]
weights = [tenseal.plain_tensor([random.gauss(0, 1)] * slots) for _ in range(features)]
started = time.perf_counter()
for _ in range(outputs):
    total = inputs[0] * weights[0]
    for ciphertext, weight in zip(inputs[1:], weights[1:], strict=True):
        total += ciphertext * weight
print(time.perf_counter() - started)
