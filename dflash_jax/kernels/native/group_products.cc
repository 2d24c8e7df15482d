// The formats in which each group has one scale.

#include "group_products.h"

using namespace dflash;

GROUPED(q8_0, Q8_0);
GROUPED(q4_0, Q4_0);
GROUPED(q4_1, Q4_1);
GROUPED(int4z, Int4Z);
GROUPED(q5_0, Q5_0);
GROUPED(q5_1, Q5_1);
GROUPED(iq4_nl, IQ4_NL);
GROUPED(mxfp4, MXFP4);
