// The formats of super-blocks, whose scales have a scale, and those of two scales a group.

#include "group_products.h"

using namespace dflash;

GROUPED(q2_k, Q2_K);
GROUPED(q3_k, Q3_K);
GROUPED(q4_k, Q4_K);
GROUPED(q5_k, Q5_K);
GROUPED(q6_k, Q6_K);
GROUPED(iq4_xs, IQ4_XS);
GROUPED(int8_16, Int8_16);
GROUPED(int8_16_low, Int8_16_Low);
