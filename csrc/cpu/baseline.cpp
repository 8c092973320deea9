// The kernels in portable C++.
#include "ranges.h"

namespace gact::cpu {

Kernels baseline_kernels() { return make_kernels<Plain, Plain>("baseline"); }

}  // namespace gact::cpu
