// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): a counter of four words is
// turned into four random ones in ten rounds. Counters are (i, 0, 0, 0) here, keys (seed, 0), and the first word
// counts.
#pragma once

#include <cstdint>

namespace gact {

constexpr int kDrawn = 32;  // words that are drawn together, of neighbouring counters
constexpr uint32_t kDrawnBits = 0x7FFFFFFF;
constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFactors[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kPhiloxKeys[2] = {0x9E3779B9, 0xBB67AE85};

// The smallest number of 31 bits that is more than `threshold` as a fraction of 2^31, rounded as Inductor does it.
inline uint32_t least_beyond(float threshold) {
  uint32_t low = 0, high = kDrawnBits + 1;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (float(middle) * 4.6566127342e-10f > threshold) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace gact
